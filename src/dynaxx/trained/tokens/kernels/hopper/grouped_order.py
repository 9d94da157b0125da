# SPDX-License-Identifier: Apache-2.0
"""Order a tile's list so that each warpgroup of `grouped.py` skips keys that only queries of the other one chose.

A tile has 128 rows, 64 for each warpgroup. Keys of its list are chosen by queries of warpgroup 0 alone (A), by queries
of warpgroup 1 alone (C), or by queries of both. In turns of KEYS keys, the new list begins with as many A as C:

    A A .. A | C C .. C | A A .. A | C C .. C | all others

All keys of a kind stay in ascending order. Each list is the same at every call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launcher import kernel_launcher

ROWS, KEYS, MAX_QUERIES = 64, 64, 32  # rows of a warpgroup, keys of a turn, queries of a tile


def queries_apart(part: int) -> tuple[int, int]:
    """Return the bits of queries whose `part` rows are all of warpgroup 0, and all of warpgroup 1, as signed words."""
    count = min(2 * ROWS // part, MAX_QUERIES)
    first = (1 << ROWS // part) - 1
    second = ((1 << count) - 1) & ~((1 << -(-ROWS // part)) - 1)
    return first, second - (1 << 32) if second >> 31 else second


def ordered(lists: Tensor, marks: Tensor, counts: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return lists and marks in the new order, and the number of turns that each warpgroup has to itself."""
    new_lists, new_marks, apart = torch.empty_like(lists), torch.empty_like(marks), torch.empty_like(counts)
    if counts.numel():
        first_alone, second_alone = queries_apart(part)
        _token_order_kernel[(counts.numel(),)](
            lists,
            marks,
            counts,
            new_lists,
            new_marks,
            apart,
            capacity=lists.shape[2],
            first_alone=first_alone,
            second_alone=second_alone,
            KEYS=KEYS,
            BLOCK=2048,
            num_warps=8,
        )
    return new_lists, new_marks, apart


@kernel_launcher
@triton.jit(do_not_specialize=["capacity", "first_alone", "second_alone"])
def _token_order_kernel(
    p_lists,  # (lists, capacity) int32
    p_marks,  # (lists, capacity) int32: a bit per query of the tile
    p_counts,  # (lists,) int32
    p_new_lists,
    p_new_marks,
    p_apart,  # (lists,) int32: turns of KEYS keys of A, and as many of C
    capacity,
    first_alone,  # bits of queries that only warpgroup 0 has
    second_alone,  # only warpgroup 1; a query may have rows of both
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_list = tl.program_id(0)
    count = tl.load(p_counts + i_list)
    begin = i_list.to(tl.int64) * capacity
    p_lists, p_marks = p_lists + begin, p_marks + begin
    p_new_lists, p_new_marks = p_new_lists + begin, p_new_marks + begin
    all_first, all_second = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        marks = tl.load(p_marks + place, mask=place < count, other=0)
        there = place < count
        all_first += (there & ((marks & ~first_alone) == 0)).to(tl.int32)
        all_second += (there & ((marks & ~second_alone) == 0)).to(tl.int32)
    turns = tl.minimum(tl.sum(all_first, 0), tl.sum(all_second, 0)) // KEYS
    tl.store(p_apart + i_list, turns)
    first, second, rest = 0, 0, 2 * KEYS * turns
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < count
        key = tl.load(p_lists + place, mask=there, other=0)
        marks = tl.load(p_marks + place, mask=there, other=0)
        of_first = (there & ((marks & ~first_alone) == 0)).to(tl.int32)
        of_second = (there & ((marks & ~second_alone) == 0)).to(tl.int32)
        rank_first = first + tl.cumsum(of_first, 0) - of_first
        rank_second = second + tl.cumsum(of_second, 0) - of_second
        in_first = (of_first != 0) & (rank_first < KEYS * turns)
        in_second = (of_second != 0) & (rank_second < KEYS * turns)
        other = (there & ~in_first & ~in_second).to(tl.int32)
        to = rest + tl.cumsum(other, 0) - other
        to = tl.where(in_first, rank_first // KEYS * (2 * KEYS) + rank_first % KEYS, to)
        to = tl.where(in_second, rank_second // KEYS * (2 * KEYS) + KEYS + rank_second % KEYS, to)
        tl.store(p_new_lists + to, key, mask=there)
        tl.store(p_new_marks + to, marks, mask=there)
        first += tl.sum(of_first, 0)
        second += tl.sum(of_second, 0)
        rest += tl.sum(other, 0)
