# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Two views of a selection, both made on the device without waiting for it.

By query: a tile of a few neighbouring positions visits the union of their blocks, each with a bit set of the positions
that selected it. By key: the queries of each block, ascending, cut into items of bounded length, so that a block that
every query selects is no longer work than any other.

T queries, Hs selection heads, n slots, C selection blocks of all sequences; P positions per tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.layout.native import NativeSpans


@dataclass(frozen=True)
class Unions:
    """Blocks by tile of positions; the first `counts` slots of each tile are filled."""

    positions: int  # P, neighbouring query rows per tile
    blocks: Tensor  # (tiles, Hs, P * n) int32, rows of `NativeSpans.block_start`
    members: Tensor  # (tiles, Hs, P * n) int32, bit i: position i of the tile selected the block
    counts: Tensor  # (tiles, Hs) int32


@dataclass(frozen=True)
class Items:
    """Entries by block. A cell is a block of a selection head, hs * C + block; an entry (t * Hs + hs) * n + slot."""

    entries: Tensor  # (T * Hs * n,) int32, sorted by cell, then by query
    first_item: Tensor  # (Hs * C + 1,) int32: cell c has items first_item[c] : first_item[c + 1]
    cell: Tensor  # (max_items,) int32, Hs * C for an item that is none
    begin: Tensor  # (max_items,) int32, its first place in `entries`
    end: Tensor  # (max_items,) int32, its last place + 1


@triton.jit(do_not_specialize=["queries", "heads"])
def _union_kernel(
    p_indices,  # (T, Hs, n) contiguous
    p_first_block,
    p_num_blocks,
    p_blocks,
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
    block = tl.where(index >= 0, index + tl.load(p_first_block + t, mask=inside, other=0), -1)
    same = (block[:, None] == block[None, :]) & (block >= 0)[:, None]  # [WIDTH, WIDTH]
    earlier = tl.sum((same & (o_entry[None, :] < o_entry[:, None])).to(tl.int32), 1)
    members = tl.sum(tl.where(same, (1 << position)[None, :], 0), 1)
    first = ((earlier == 0) & (block >= 0)).to(tl.int32)
    rank = tl.cumsum(first, 0) - 1
    base = (i_tile * heads + i_h) * (POSITIONS * SLOTS)
    tl.store(p_blocks + base + rank, block, mask=first != 0)
    tl.store(p_members + base + rank, members, mask=first != 0)
    tl.store(p_counts + i_tile * heads + i_h, tl.sum(first, 0))


def unions(indices: Tensor, spans: NativeSpans, positions: int) -> Unions:
    """The union of the blocks of every `positions` neighbouring rows; what no query may see is left out."""
    queries, heads, slots = indices.shape
    tiles = -(-queries // positions)
    shape = (tiles, heads, positions * slots)
    found = Unions(positions, indices.new_empty(shape), indices.new_empty(shape), indices.new_empty(tiles, heads))
    if tiles:
        _union_kernel[(tiles, heads)](
            indices,
            spans.first_block,
            spans.num_blocks,
            found.blocks,
            found.members,
            found.counts,
            queries=queries,
            heads=heads,
            SLOTS=slots,
            POSITIONS=positions,
            WIDTH=triton.next_power_of_2(positions * slots),
        )
    return found


def items(indices: Tensor, spans: NativeSpans, queries: slice, length: int) -> Items:
    """The entries of some query rows by block, at most `length` of them in an item.

    Args:
        indices: (T, Hs, n) of all queries; entries are numbered within them.
    """
    some = indices[queries]
    heads, slots, blocks = indices.shape[1], indices.shape[2], len(spans.block_start)
    cells = heads * blocks
    head = torch.arange(heads, device=indices.device, dtype=torch.int32)[:, None]
    seen = (some >= 0) & (some < spans.num_blocks[queries, None, None])
    cell = torch.where(seen, some + spans.first_block[queries, None, None] + head * blocks, cells)
    ordered, entries = cell.flatten().sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(cells + 1, device=indices.device, dtype=torch.int32))
    counts = starts.diff()
    ends = (counts + length - 1).div(length, rounding_mode="floor").cumsum(0)
    first_item = torch.nn.functional.pad(ends, (1, 0))
    item = torch.arange(cells + cell.numel() // length, device=indices.device)
    of_cell = torch.searchsorted(ends, item, right=True)
    padded = torch.nn.functional.pad(starts, (0, 1))  # an item that is none: from 0 to 0
    begin = padded[of_cell] + (item - first_item[of_cell]) * length
    begin = torch.where(of_cell < cells, begin, 0)
    end = torch.where(of_cell < cells, torch.minimum(begin + length, padded[(of_cell + 1).clamp(max=cells)]), 0)
    as_int = lambda x: x.to(torch.int32)
    return Items(
        as_int(entries + queries.start * heads * slots), as_int(first_item), as_int(of_cell), as_int(begin), as_int(end)
    )
