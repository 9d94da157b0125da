# SPDX-License-Identifier: Apache-2.0
"""Join the selected blocks of neighbouring queries into one list per tile, on the device and without synchronization.

A tile of a few neighbouring positions visits the union of their blocks. Each block of the union carries the set of
positions that selected it, as bits.

Legend: T queries, Hs selection heads, n slots, C selection blocks of all sequences; P positions per tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.spans import NsaSpans

MAX_POSITIONS = tl.constexpr(32)  # bits of a slot's set of positions
NONE = tl.constexpr(0x7FFFFFFF)  # sorts after every block


@dataclass(frozen=True)
class Unions:
    """The blocks of each tile of positions; the first `counts` slots of a tile are filled."""

    positions: int  # P, number of neighbouring query rows per tile
    starts: Tensor  # (tiles, Hs, P * n) int32, first key row of each block
    members: Tensor  # (tiles, Hs, P * n) int32, bit i is set if position i of the tile selected the block
    counts: Tensor  # (tiles, Hs) int32


@triton.jit
def _join(block, bits, next_block, next_bits):
    """Combine the bits of neighbouring slots with the same block; for a scan over slots sorted by block."""
    return next_block, tl.where(block == next_block, bits, 0) | next_bits


@kernel_launcher
@triton.jit(do_not_specialize=["queries", "heads"])
def _query_unions_kernel(
    p_indices,  # (T, Hs, n) contiguous
    p_first_block,
    p_num_blocks,
    p_block_start,
    p_starts,
    p_members,
    p_counts,
    queries,
    heads,
    SLOTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    WIDTH: tl.constexpr,  # POSITIONS * SLOTS as a power of two
):
    i_tile = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_entry = tl.arange(0, WIDTH)
    position = o_entry // SLOTS
    t = i_tile * POSITIONS + position
    inside = (position < POSITIONS) & (t < queries)
    index = tl.load(p_indices + (t * heads + i_h) * SLOTS + o_entry % SLOTS, mask=inside, other=-1)
    index = tl.where(index < tl.load(p_num_blocks + t, mask=inside, other=0), index, -1)
    block = index + tl.load(p_first_block + t, mask=inside, other=0)
    key = tl.sort(tl.where(index >= 0, block * MAX_POSITIONS + position, NONE))
    block = key // MAX_POSITIONS
    bits = tl.full([WIDTH], 1, tl.int32) << (key % MAX_POSITIONS)
    _, members = tl.associative_scan((block, bits), 0, _join)
    before = tl.gather(block, tl.maximum(o_entry - 1, 0), 0)
    behind = tl.gather(block, tl.minimum(o_entry + 1, WIDTH - 1), 0)
    known = key != NONE
    first = (known & ((o_entry == 0) | (before != block))).to(tl.int32)
    last = known & ((o_entry == WIDTH - 1) | (behind != block))
    rank = tl.cumsum(first, 0) - 1
    base = (i_tile * heads + i_h) * (POSITIONS * SLOTS)
    tl.store(p_starts + base + rank, tl.load(p_block_start + block, mask=last, other=0), mask=last)
    tl.store(p_members + base + rank, members, mask=last)
    tl.store(p_counts + i_tile * heads + i_h, tl.sum(first, 0))


@kernel_launcher
@triton.jit(do_not_specialize=["total", "limit"])
def _choose_schedule_kernel(p_counts, p_taken, total, limit, BLOCK: tl.constexpr):
    found = tl.full([], 0, tl.int32)
    for begin in range(0, total, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        found += tl.sum(tl.load(p_counts + place, mask=place < total, other=0), 0)
    tl.store(p_taken, (found <= limit).to(tl.int32))
    if found > limit:
        for begin in range(0, total, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            tl.store(p_counts + place, place * 0, mask=place < total)


def choose(union: Unions, limit: int) -> Tensor:
    """Return (1,) int32: 1 if all unions together hold at most `limit` blocks; otherwise empty them and return 0."""
    taken = union.counts.new_empty(1)
    _choose_schedule_kernel[(1,)](union.counts, taken, total=union.counts.numel(), limit=limit, BLOCK=4096, num_warps=8)
    return taken


def unions(indices: Tensor, spans: NsaSpans, positions: int) -> Unions:
    """Return the unions of the blocks of every `positions` neighbouring rows, without blocks hidden from a query."""
    queries, heads, slots = indices.shape
    tiles = -(-queries // positions)
    shape = (tiles, heads, positions * slots)
    width = triton.next_power_of_2(positions * slots)
    found = Unions(positions, indices.new_empty(shape), indices.new_empty(shape), indices.new_empty(tiles, heads))
    if tiles:
        _query_unions_kernel[(tiles, heads)](
            indices,
            spans.first_block,
            spans.num_blocks,
            spans.block_start,
            found.starts,
            found.members,
            found.counts,
            queries=queries,
            heads=heads,
            SLOTS=slots,
            POSITIONS=positions,
            WIDTH=max(2, width),
            num_warps=1 if width <= 256 else 4,
        )
    return found
