# SPDX-License-Identifier: Apache-2.0
"""Helpers of the Triton kernels: rows of a layout, positions of a tile, guarded loads.

A row of a layout is a list of blocks. A tile of TILE tokens is part of one block if TILE <= BLOCK. A larger tile
gathers TILE // BLOCK blocks, so that small blocks still fill a matrix instruction.

    row of a layout    [ partial blocks | full blocks ]
    passes             PARTIAL: masked tiles, and full ones at the end of the sequence; FULL: the others, unmasked

Whatever a layout's tensors contain, no helper reads outside of them, and positions outside the sequence load as zero.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# The passes over a row, in order.
PARTIAL = tl.constexpr(0)  # visible pairs are those of the blocks' element masks
FULL = tl.constexpr(1)  # every pair of the tile is visible
BOUNDS = tl.constexpr(2)  # every pair within the lengths is visible: last full block, or full block in the PARTIAL pass


class HeadRows(NamedTuple):
    """Rows of one head."""

    source: Any  # a pointer to the first row; under TMA, a descriptor of (B, H, N, D)
    i_b: Any
    i_h: Any
    stride: Any
    seqlen: Any
    column: Any  # first column, under TMA


class LayoutRow(NamedTuple):
    """The blocks of a row that a program visits, and the numbers of their tiles."""

    tables: Any  # `LayoutTables`
    start: Any  # first entry
    partial: Any  # number of partial blocks, which come first
    total: Any  # number of blocks
    partial_tiles: Any
    whole: Any  # tiles of full blocks that certainly end within the sequence
    left: Any  # the other tiles of full blocks


@triton.jit
def head_rows(source, strides, i_b, i_h, seqlen, TMA: tl.constexpr, column=0):
    """Return the rows of one head of a tensor, given by a pointer or, under TMA, by a descriptor.

    Rows begin at column `column`, which must be 0 for a pointer.
    """
    if not TMA:
        source += i_b * strides.b + i_h * strides.h
    return HeadRows(source=source, i_b=i_b, i_h=i_h, stride=strides.n, seqlen=seqlen, column=column)


@triton.jit
def row_entries(layout, layout_head, i_row, num_rows):
    """Return first entry, number of partial blocks and number of blocks of a row, all within the layout's capacity."""
    at = layout_head.to(tl.int64) * (num_rows + 1) + i_row
    start = tl.minimum(tl.maximum(tl.load(layout.tables.p_indptr + at), 0), layout.capacity)
    count = tl.minimum(tl.maximum(tl.load(layout.tables.p_indptr + at + 1), start), layout.capacity) - start
    partial = tl.load(layout.tables.p_num_partial + layout_head.to(tl.int64) * num_rows + i_row)
    return start, tl.minimum(tl.maximum(partial, 0), count), count


@triton.jit
def tile_positions(
    tables, first, count, i_tile, seqlen, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKING: tl.constexpr
):
    """Return the positions of tile `i_tile` of `count` blocks from entry `first`: start, offsets, inner, mask ids.

    The tile holds positions start + offsets [TILE] of the sequence; `inner` are positions in the block. Within one
    block, start and mask id are scalars and the offsets are equal for every tile, so address computations stay out of
    the loop. If the tile gathers blocks, start is 0 and mask_ids are [TILE]. Slots after the last block get negative
    positions. With FULL, every position is within the sequence, even if an index is not.
    """
    o_tile = tl.arange(0, TILE)
    if TILE <= BLOCK:
        SPLIT: tl.constexpr = BLOCK // TILE
        part = i_tile % SPLIT * TILE
        block = tl.load(tables.p_indices + first + i_tile // SPLIT)
        mask_id = tl.load(tables.p_mask_ids + first + i_tile // SPLIT)
        inner = part + o_tile
        offsets = o_tile
    else:
        part = 0
        slot = i_tile * (TILE // BLOCK) + o_tile // BLOCK
        block = tl.load(tables.p_indices + first + slot, mask=slot < count, other=-1)
        mask_id = tl.load(tables.p_mask_ids + first + slot, mask=slot < count, other=-1)
        inner = o_tile % BLOCK
        offsets = inner
    if MASKING == FULL:
        block = tl.minimum(tl.maximum(block, 0), seqlen // BLOCK - 1)
    start = (block * BLOCK + part).to(tl.int64)
    if TILE > BLOCK:
        offsets = start + offsets
        start = 0
    return start, offsets, inner, mask_id


@triton.jit
def whole_tiles(count, seqlen, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return how many tiles of `count` full blocks certainly lie within the sequence: all but the last block's."""
    tiles = tl.cdiv(count * BLOCK, TILE) - (BLOCK + TILE - 1) // TILE
    return tl.where(seqlen < BLOCK, 0, tl.maximum(tiles, 0))


@triton.jit
def row_of(layout, start, partial, total, seqlen, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return `total` blocks from entry `start`, the first `partial` of them partial, as a `LayoutRow`."""
    tokens = (total - partial) * BLOCK
    tiles = tl.cdiv(tokens, TILE)
    filled = (seqlen % BLOCK == 0) & (tokens % TILE == 0)  # otherwise a tile that gathers blocks may have empty slots
    whole = tl.where(filled, tiles, whole_tiles(total - partial, seqlen, BLOCK, TILE))
    return LayoutRow(
        tables=layout.tables, start=start, partial=partial, total=total,
        partial_tiles=tl.cdiv(partial * BLOCK, TILE), whole=whole, left=tiles - whole,
    )  # fmt: skip


@triton.jit
def tile_of_pass(i_tile, row, MASKING: tl.constexpr):
    """Return, for tile `i_tile` of a pass, first entry and number of its blocks, its index there, and if it is full.

    The PARTIAL pass also processes the tiles that FULL leaves out, after its own.
    """
    if MASKING == FULL:
        return row.start + row.partial, row.total - row.partial, i_tile, True
    is_full = i_tile >= row.partial_tiles
    first = tl.where(is_full, row.start + row.partial, row.start)
    count = tl.where(is_full, row.total - row.partial, row.partial)
    return first, count, tl.where(is_full, i_tile - row.partial_tiles + row.whole, i_tile), is_full


@triton.jit
def steps_of_pass(row, MASKING: tl.constexpr):
    """Return first, last + 1 and final step of a pass: FULL's are tiles of the row; PARTIAL's continue to them."""
    masked = row.partial_tiles + row.left
    if MASKING == FULL:
        return row.partial_tiles, row.partial_tiles + row.whole, row.partial_tiles + row.whole - 1
    return 0, masked, masked + row.whole - 1


@triton.jit
def entry_of_step(i_step, row, MASKING: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return a step's entry of the layout, and its position in the block; a block has one or more tiles.

    The PARTIAL pass processes the tiles of partial blocks, and those that FULL leaves out.
    """
    SPLIT: tl.constexpr = BLOCK // TILE
    i_tile = i_step
    if MASKING == PARTIAL:
        i_tile = tl.where(i_step < row.partial_tiles + row.left, i_step + row.whole, i_step - row.left)
        i_tile = tl.where(i_step < row.partial_tiles, i_step, i_tile)
    return row.start + i_tile // SPLIT, i_tile % SPLIT * TILE


@triton.jit
def block_ahead(p_indices, first, i_tile, tiles, SPLIT: tl.constexpr):
    """Return the block of full tile `i_tile` of `tiles`; past the end, the last one. A block has SPLIT tiles."""
    i_tile = tl.minimum(i_tile, tiles - 1)
    return tl.load(p_indices + first + i_tile // SPLIT, mask=i_tile >= 0, other=0)


@triton.jit
def load_rows(
    p_base, start, offsets, stride, seqlen, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CHECKED: tl.constexpr = True
):
    """Load [len(offsets), BLOCK_DIM] rows start + offsets of one head; zero outside the sequence and head_dim."""
    o_d = tl.arange(0, BLOCK_DIM)
    p_rows = p_base + start * stride + (offsets.to(tl.int64)[:, None] * stride + o_d[None, :])
    if CHECKED:
        positions = start + offsets
        inside = ((positions >= 0) & (positions < seqlen))[:, None]
        if DIM < BLOCK_DIM:
            inside = inside & (o_d < DIM)[None, :]
        rows = tl.load(p_rows, mask=inside, other=0.0)
    elif DIM < BLOCK_DIM:
        rows = tl.load(p_rows, mask=(o_d < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(p_rows)
    return rows


@triton.jit
def load_tile(
    head, start, offsets, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, CHECKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Load a tile of `HeadRows` like `load_rows`; under TMA by its descriptor, which pads with zeros."""
    if TMA:
        at = [head.i_b.to(tl.int32), head.i_h.to(tl.int32), start.to(tl.int32), head.column]
        rows = head.source.load(at).reshape(TILE, BLOCK_DIM)
    else:
        rows = load_rows(head.source, start, offsets, head.stride, head.seqlen, DIM, BLOCK_DIM, CHECKED)
    return rows


@triton.jit
def store_rows(p_base, rows, positions, stride, seqlen, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store rows at the addresses that `load_rows` would load from, in the pointer's dtype."""
    o_d = tl.arange(0, BLOCK_DIM)
    inside = ((positions >= 0) & (positions < seqlen))[:, None] & (o_d < DIM)[None, :]
    p_rows = p_base + positions.to(tl.int64)[:, None] * stride + o_d[None, :]
    tl.store(p_rows, rows.to(p_base.dtype.element_ty), mask=inside)
