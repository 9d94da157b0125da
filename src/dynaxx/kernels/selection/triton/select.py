# SPDX-License-Identifier: Apache-2.0
"""Selection of blocks on the device: from a row's scores to bits and counts, without sorting and without the host.

    scores of a row -> bisection for the threshold -> bits of selected blocks, counts -> running sum -> `entries`

One program per row of q blocks and selection, which may serve several heads, bisects the row's threshold between its
smallest and its largest score, in the order of their bits. Blocks that the pattern shows anyway are never selected a
second time. The running sum of the counts gives the position of each row's entries.

Legend: B batch, H selections per batch entry, Hq q heads, R rows of q blocks, C kv blocks, W words of 32 blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.primitives.numbers import ordered_bits
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.selection.triton.row import (
    EMPTY,
    GRID_SIZES,
    StaticEntries,
    causal_mask_id,
    columns,
    grid_arguments,
    static_arguments,
    static_row,
    warps,
)
from dynaxx.layout import BlockGrid

TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
OF_MAX = tl.constexpr(2)
OF_UNIFORM = tl.constexpr(3)
MOST = tl.constexpr(3.4028234663852886e38)  # of fp32
MODES = {"top_k": 0, "top_p": 1, "of_max": 2, "of_uniform": 3}


class ChoiceRule(NamedTuple):
    """The number of blocks to select in a row."""

    mode: str  # one of MODES
    amounts: Tensor  # (q_heads | 1,) fp32: number or share of blocks, share of the mass, or share of the reference
    shares: bool  # top_k: whether amounts are shares of the visible blocks
    floor: int  # top_k: rows that see fewer blocks get the share of this many


@triton.jit
def _top(keys, optional, weights, goal):
    """Return the best of `optional`: blocks whose better blocks weigh less than `goal` in sum; ties go left."""
    low = tl.min(tl.where(optional, keys, 0xFFFFFFFF).to(tl.int64), 0)  # the largest threshold that reaches `goal` ...
    keys = tl.where(optional, keys, 0)  # below every threshold
    weights = tl.where(optional, weights, 0.0)
    high = tl.max(keys.to(tl.int64), 0)  # ... lies between low and high
    while low < high:
        middle = (low + high + 1) // 2
        above = tl.sum(tl.where(keys >= middle.to(tl.uint32), weights, 0.0), 0)
        low = tl.where(above >= goal, middle, low)
        high = tl.where(above == goal, low, tl.where(above > goal, high, middle - 1))
    threshold = low.to(tl.uint32)
    ahead = tl.sum(tl.where(keys > threshold, weights, 0.0), 0)
    tied = keys == threshold
    tied_weights = tl.where(tied, weights, 0.0)
    before = ahead + tl.cumsum(tied_weights, 0) - tied_weights
    return (keys > threshold) | (tied & (before < goal))


@triton.jit
def _load_scores(p_row, o_c, seen):
    """Return scores [C] of a row of a head. NaN ranks first, so that it reaches the output of attention."""
    scores = tl.load(p_row + o_c, mask=seen, other=float("-inf"))
    return tl.where(scores <= MOST, scores, MOST)


@triton.jit
def _row_scores(
    p_scores,
    i_head,
    rows,
    row,
    kv_blocks,
    o_c,
    seen,
    optional,
    HEADS_PER_CHOICE: tl.constexpr,
    ONLY_RANKS: tl.constexpr,
):
    """Return the scores [C] of a row of a head. If HEADS_PER_CHOICE > 1, neighbouring heads are summed.

    Like `selection.groups.shared_scores`, or `shared_ranks` if ONLY_RANKS.
    """
    if HEADS_PER_CHOICE == 1:
        scores = _load_scores(p_scores + (i_head * rows + row) * kv_blocks, o_c, seen)
    else:
        total = o_c * 0.0
        for i_other in range(HEADS_PER_CHOICE):
            p_row = p_scores + ((i_head // HEADS_PER_CHOICE * HEADS_PER_CHOICE + i_other) * rows + row) * kv_blocks
            own = _load_scores(p_row, o_c, seen)
            if ONLY_RANKS:
                own = tl.where(optional, own, float("-inf"))
            best = tl.max(own, 0)
            mass = tl.exp(own - tl.where(best == float("-inf"), 0.0, best))
            if not ONLY_RANKS:
                found = tl.sum(mass, 0)
                mass = mass / tl.where(found == 0, 1.0, found)
            total += mass
        scores = tl.where(seen, tl.log(tl.maximum(total, 1.1754944e-38)), float("-inf"))
    return scores


@kernel_launcher
@triton.jit(do_not_specialize=["first_row", "rows", "choices", "serves", *GRID_SIZES])
def _choose_rows_kernel(
    p_scores,  # (B, Hq, rows, C) fp32 contiguous
    p_amounts,  # (H | 1,) fp32
    p_indptr,
    p_indices,
    p_mask_ids,
    p_same,
    p_bits,  # (B, H, R, W) int32
    p_counts,  # (B, Hq, 1 + R) int32: 0, then the number of blocks that each row visits
    p_partial,  # (B, Hq, R) int32: number of partial blocks
    first_row,
    rows,
    choices,
    serves,
    amount_stride,
    floor,
    seqlen_q,
    seqlen_k,
    q_blocks,
    kv_blocks,
    q_block,
    kv_block,
    first_distance,
    shift,
    MODE: tl.constexpr,
    SHARES: tl.constexpr,
    HEADS_PER_CHOICE: tl.constexpr,
    HAS_STATIC: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    i_bh = i_program // rows
    i_row = (first_row + i_program % rows).to(tl.int32)
    o_c = tl.arange(0, BLOCK_C)
    row_distance = i_row * q_block + seqlen_k - seqlen_q
    causal = causal_mask_id(row_distance - o_c * kv_block, first_distance, shift, q_block, kv_block, CAUSAL)
    last = tl.minimum(i_row * q_block + q_block, seqlen_q) - 1 + seqlen_k - seqlen_q
    visible = kv_blocks
    if CAUSAL:
        visible = tl.where(last < 0, 0, tl.minimum(last // kv_block + 1, kv_blocks))
    own, covered = static_row(
        p_indptr, p_indices, p_mask_ids, p_same, i_row, o_c, row_distance, first_distance, shift, q_block, kv_block,
        HAS_STATIC, CAUSAL,
    )  # fmt: skip
    seen = o_c < visible
    optional = seen & (causal != EMPTY) & ~covered
    scores = _row_scores(
        p_scores, i_bh * serves, rows, i_program % rows, kv_blocks, o_c, seen, optional, HEADS_PER_CHOICE, MODE == TOP_K
    )
    amount = tl.load(p_amounts + i_bh % choices * amount_stride)
    if MODE == TOP_K:
        count = amount
        if SHARES:
            count = tl.ceil(tl.maximum(visible, floor).to(tl.float32) * amount)
        everything = count >= visible
        chosen = _top(ordered_bits(scores), optional & (scores != float("-inf")), o_c * 0.0 + 1.0, count)
        chosen = tl.where(everything, optional, chosen)
    else:
        best = tl.max(scores, 0)
        mass = tl.exp(scores - tl.where(best == float("-inf"), 0.0, best))
        total = tl.sum(mass, 0)
        if MODE == TOP_P:
            share = mass / tl.where(total == 0, 1.0, total)
            sure = tl.sum(tl.where(covered, share, 0.0), 0)
            goal = amount - sure
            chosen = _top(ordered_bits(scores), optional & (share * 0 < goal), share, goal)
            chosen = tl.where(amount >= 1, optional, chosen)
        else:
            reference = best
            if MODE == OF_UNIFORM:
                uniform = tl.where(total == 0, 1.0, total) / tl.maximum(visible, 1).to(tl.float32)
                reference = best + tl.log(uniform)
            least = tl.where(amount == 0, float("-inf"), reference + tl.log(tl.where(amount == 0, 1.0, amount)))
            chosen = optional & (scores >= least)

    mask_id = tl.where(chosen, causal, own)
    visited, partial = tl.sum((mask_id != EMPTY).to(tl.int32), 0), tl.sum((mask_id >= 0).to(tl.int32), 0)
    for i_head in range(i_bh * serves, i_bh * serves + serves):
        p_count = p_counts + i_head * (q_blocks + 1)
        tl.store(p_count, 0, mask=i_row == 0)
        tl.store(p_count + 1 + i_row, visited)
        tl.store(p_partial + i_head * q_blocks + i_row, partial)
    words = tl.sum(tl.reshape(chosen.to(tl.int32), [BLOCK_C // 32, 32]) << tl.arange(0, 32)[None, :], 1)
    o_w = tl.arange(0, BLOCK_C // 32)
    num_words = (kv_blocks + 31) // 32
    tl.store(p_bits + (i_bh * q_blocks + i_row) * num_words + o_w, words, mask=o_w < num_words)


def choose_rows(
    scores: Tensor,
    first_row: int,
    grid: BlockGrid,
    rule: ChoiceRule,
    heads_per_choice: int,
    static: StaticEntries,
    bits: Tensor,
    counts: Tensor,
    partial: Tensor,
) -> None:
    """Select blocks for some rows, with H selections each: one per q head, or one that serves several.

    Args:
        scores: (B, Hq, rows, C) fp32, scores of rows from `first_row`.
        first_row: first row of q blocks.
        grid: lengths and block sizes.
        rule: how many blocks to select.
        heads_per_choice: number of neighbouring heads that select together, by the sum of what they give to each block.
        static: entries of the pattern.
        bits: (B, H, R, W) int32, receives the selected blocks.
        counts: (B, Hq, 1 + R) int32, receives 0, then the number of blocks that each row visits, with the pattern's.
        partial: (B, Hq, R) int32, receives the number of partial blocks among them.
    """
    (batch, q_heads, rows, _), choices = scores.shape, bits.shape[1]
    block_c = columns(grid.kv_blocks)
    _choose_rows_kernel[(batch * choices * rows,)](
        scores.contiguous(),
        rule.amounts,
        *static_arguments(static, counts),
        bits,
        counts,
        partial,
        first_row=first_row,
        rows=rows,
        choices=choices,
        serves=q_heads // choices,
        amount_stride=1 if rule.amounts.numel() > 1 else 0,
        floor=rule.floor,
        **grid_arguments(grid),
        MODE=MODES[rule.mode],
        SHARES=rule.shares,
        HEADS_PER_CHOICE=heads_per_choice,
        HAS_STATIC=static.layout is not None,
        BLOCK_C=block_c,
        num_warps=warps(block_c),
    )
