# SPDX-License-Identifier: Apache-2.0
"""Device functions that find a program's line of a layout, or its part of a split one (see `split`)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

WHOLE = tl.constexpr(-1)  # slot of a line that is not split
NOTHING = tl.constexpr(-2)  # slot of a split line, whose parts are computed by other programs


class LayoutRows(NamedTuple):
    """The rows of kv blocks of a layout, or its columns of q blocks."""

    tables: Any  # `LayoutTables`
    capacity: Any  # entries; no helper reads beyond them
    num_masks: Any
    stride_b: Any  # by batch entry, in heads of the layout
    stride_h: Any


class Parts(NamedTuple):
    """The parts of split lines, see `SplitLines`."""

    p_parts: Any  # (parts, 3) int32: line, first entry, last entry + 1
    number: Any
    limit: Any  # most entries of a line that is not split
    batch_copies: Any  # batch entries that each listed line stands for
    head_copies: Any


class QueryTile(NamedTuple):
    """The tile of queries that a program computes."""

    i_b: Any
    i_h: Any
    layout_head: Any  # index of this head among the layout's heads
    i_row: Any
    part_q: Any  # offset of the tile in its block
    slot: Any  # slot of the part, or WHOLE
    first: Any  # first entry of the part
    last: Any  # last entry of the part + 1


@triton.jit
def started_tile(i_program, tiles, heads, span):
    """Return head and rank of a program's tile: `span` tiles of each head, then the next `span` tiles of each head.

    Concurrent programs then read few heads, whose keys stay in L2, and the longest rows of all heads still start first.
    """
    begin = i_program // (span * heads) * span
    rest = i_program - begin * heads
    span = tl.minimum(span, tiles - begin)
    return rest // span, begin + rest % span


@triton.jit
def started_row(p_order, layout_head, rank, num_rows, ORDERED: tl.constexpr):
    """Return the row that starts at position `rank`: in the layout's order, or the last row first."""
    row = num_rows - 1 - rank
    if ORDERED:
        row = tl.load(p_order + layout_head.to(tl.int64) * num_rows + rank)
        row = tl.minimum(tl.maximum(row, 0), num_rows - 1)
    return row


@triton.jit
def query_tile(
    p_order, layout, parts, seqlen_q, batch, q_heads, span,
    Q_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, ORDERED: tl.constexpr, HAS_PARTS: tl.constexpr,
):  # fmt: skip
    """Return the tile of a program: programs for parts come first, then one per tile of every row."""
    SPLIT_M: tl.constexpr = Q_BLOCK // BLOCK_M
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    part_programs = parts.number * parts.batch_copies * parts.head_copies * SPLIT_M
    i_program = tl.maximum(tl.program_id(0) - part_programs, 0)
    i_head, i_tile = started_tile(i_program, q_blocks * SPLIT_M, batch * q_heads, span)
    i_h = (i_head % q_heads).to(tl.int64)
    i_b = (i_head // q_heads).to(tl.int64)
    slot, first, last = WHOLE, 0, 0
    if HAS_PARTS:
        slot, part_b, part_h, part_row, part_tile, first, last = part_of(
            tl.program_id(0), parts, q_blocks, q_heads, SPLIT_M
        )
        i_b, i_h = tl.where(slot >= 0, part_b, i_b), tl.where(slot >= 0, part_h, i_h)
        i_tile = tl.where(slot >= 0, part_tile, i_tile)
    layout_head = i_b * layout.stride_b + i_h * layout.stride_h
    i_row = started_row(p_order, layout_head, i_tile // SPLIT_M, q_blocks, ORDERED)
    if HAS_PARTS:
        i_row = tl.where(slot >= 0, part_row, i_row)
    part_q = i_tile % SPLIT_M * BLOCK_M
    return QueryTile(
        i_b=i_b, i_h=i_h, layout_head=layout_head, i_row=i_row, part_q=part_q, slot=slot, first=first, last=last
    )


@triton.jit
def part_of(i_program, parts, num_lines, heads, TILES: tl.constexpr):
    """Return the part that a program computes a tile of; undefined values for other programs.

    Returns:
        slot, or WHOLE; batch entry, head, row (or column) and tile; first entry and last entry + 1 within the line.
    """
    copies = parts.batch_copies * parts.head_copies
    is_part = i_program < parts.number * copies * TILES
    slot = tl.where(is_part, i_program // TILES, 0)
    p_part = parts.p_parts + slot // copies * 3
    line = tl.load(p_part)
    line_heads = heads // parts.head_copies
    i_b = line // num_lines // line_heads + slot % copies // parts.head_copies
    i_h = line // num_lines % line_heads + slot % parts.head_copies
    slot = tl.where(is_part, slot, WHOLE)
    return slot, i_b, i_h, line % num_lines, i_program % TILES, tl.load(p_part + 1), tl.load(p_part + 2)


@triton.jit
def entries_of(slot, start, partial, total, first, last, limit):
    """Return a program's share of a row's entries: its part, all entries, or NOTHING if the row is split."""
    split = (slot == WHOLE) & (total > limit)
    begin = tl.where(slot == WHOLE, 0, tl.minimum(first, total))
    end = tl.where(slot == WHOLE, tl.where(split, 0, total), tl.minimum(last, total))
    total = end - begin
    partial = tl.minimum(tl.maximum(partial - begin, 0), total)
    return tl.where(split, NOTHING, slot), start + begin, partial, total


@triton.jit
def store_part(p_sums, slot, rows, inner, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a tile of a part at positions `inner` of its block, (slots, BLOCK, D) fp32; do nothing without a part."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = p_sums + (tl.maximum(slot, 0).to(tl.int64) * BLOCK + inner)[:, None] * D + o_d[None, :]
    tl.store(p_rows, rows, mask=(inner < tl.where(slot >= 0, BLOCK, 0))[:, None] & (o_d < D)[None, :])
