# SPDX-License-Identifier: Apache-2.0
"""Device functions that find a program's part of a long row or column, and store its sums. See `gpu.schedule.split`."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WHOLE = gl.constexpr(-1)  # slot of a column that is not split
NOTHING = gl.constexpr(-2)  # slot of a split column, whose parts are computed by other programs
ALL_ENTRIES = gl.constexpr((1 << 31) - 1)


@gluon.jit
def turns_of_program(all_units):
    """Return how many units of work this persistent program processes: `unit_of_turn` of each turn lies within them."""
    programs = gl.num_programs(0)
    whole = all_units // programs
    first = unit_of_turn(whole) - whole * programs
    return whole + (first < all_units - whole * programs).to(gl.int32)


@gluon.jit
def unit_of_turn(i_turn):
    """Return this persistent program's unit of work of a turn.

    Units are sorted by length in parts, longest first. Every second turn therefore gives them to the programs in
    reverse: a program that got a longer unit than others gets a shorter one next.
    """
    programs = gl.num_programs(0)
    place = gl.where(i_turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return i_turn * programs + place


@gluon.jit
def column_length(layout, i_b, i_hk, i_col, kv_blocks, group_size):
    """Return the number of entries of a column, over all heads of a group."""
    length = 0
    for i_group in range(group_size):
        layout_head = (i_b * layout.stride_b + (i_hk * group_size + i_group) * layout.stride_h).to(gl.int64)
        p_column = layout.tables.p_indptr + layout_head * (kv_blocks + 1) + i_col
        start = gl.minimum(gl.maximum(gl.load(p_column), 0), layout.capacity)
        length += gl.minimum(gl.maximum(gl.load(p_column + 1), start), layout.capacity) - start
    return length


@gluon.jit
def part_or_whole(i_program, i_b, i_hk, i_col, layout, parts, kv_blocks, kv_heads, group_size):
    """Return batch entry, kv head and column of a program, its first entry and last entry + 1, and its slot.

    Programs for parts come first. The others process their usual column, and do nothing if it is split.
    """
    copies = parts.batch_copies * parts.head_copies
    is_part = i_program < parts.number * copies
    p_part = parts.p_parts + gl.where(is_part, i_program // copies, 0) * 3
    line = gl.load(p_part)
    row_heads = kv_heads // parts.head_copies
    i_copy = i_program % copies
    i_b = gl.where(is_part, line // kv_blocks // row_heads + i_copy // parts.head_copies, i_b)
    i_hk = gl.where(is_part, line // kv_blocks % row_heads + i_copy % parts.head_copies, i_hk)
    i_col = gl.where(is_part, line % kv_blocks, i_col)
    length = column_length(layout, i_b, i_hk, i_col, kv_blocks, group_size)
    slot = gl.where(is_part, i_program, gl.where(length > parts.limit, NOTHING, WHOLE))
    first = gl.where(is_part, gl.load(p_part + 1), 0)
    last = gl.where(is_part, gl.load(p_part + 2), gl.where(length > parts.limit, 0, ALL_ENTRIES))
    return i_b, i_hk, i_col, first, last, slot


class RowUnit(NamedTuple):
    """The row of blocks of a unit of work, or a part of one."""

    i_b: Any
    i_h: Any  # first head
    i_row: Any  # of a part
    first: Any  # first entry of a part
    last: Any  # last entry of a part + 1
    is_part: Any


@gluon.jit
def row_or_part(i_unit, i_b, i_h, parts, q_blocks, units, HEADS: gl.constexpr, HAS_PARTS: gl.constexpr):
    """Return the `RowUnit` of a unit of work: the part with this number, else head i_h. A head has HEADS heads."""
    is_part, i_row, first, last = False, 0, 0, 0
    if HAS_PARTS:
        copies = parts.batch_copies * parts.head_copies
        is_part = i_unit < parts.number * copies
        p_part = parts.p_parts + gl.where(is_part, i_unit // copies, 0) * 3
        line = gl.load(p_part)
        row_units = units // parts.head_copies
        part_b = line // q_blocks // row_units + i_unit % copies // parts.head_copies
        part_unit = line // q_blocks % row_units + i_unit % parts.head_copies
        i_row, first, last = line % q_blocks, gl.load(p_part + 1), gl.load(p_part + 2)
        i_h = gl.where(is_part, part_unit * HEADS, i_h)
        i_b = gl.where(is_part, part_b, i_b)
    return RowUnit(i_b=i_b, i_h=i_h, i_row=i_row, first=first, last=last, is_part=is_part)


@gluon.jit
def read_row(unit, rank, p_order, layout, limit, q_blocks, ORDERED: gl.constexpr, HAS_PARTS: gl.constexpr):
    """Return row, first entry, number of entries and number of partial entries of a unit: row `rank`, or its part.

    All entries lie within the layout's capacity. A row that is split into parts has no entries, and lies past the last
    row, where nothing is stored.
    """
    layout_head = (unit.i_b * layout.stride_b + unit.i_h * layout.stride_h).to(gl.int64)
    i_row = q_blocks - 1 - rank  # longest rows first, under a causal mask
    if ORDERED:
        i_row = gl.load(p_order + layout_head * q_blocks + rank)
        i_row = gl.minimum(gl.maximum(i_row, 0), q_blocks - 1)
    if HAS_PARTS:
        i_row = gl.where(unit.is_part, unit.i_row, i_row)
    p_row = layout.tables.p_indptr + layout_head * (q_blocks + 1) + i_row
    start = gl.minimum(gl.maximum(gl.load(p_row), 0), layout.capacity)
    count = gl.minimum(gl.maximum(gl.load(p_row + 1), start), layout.capacity) - start
    partial = gl.load(layout.tables.p_num_partial + layout_head * q_blocks + i_row)
    partial = gl.minimum(gl.maximum(partial, 0), count)
    if HAS_PARTS:
        split = (count > limit) & (unit.is_part == 0)
        first = gl.where(unit.is_part, gl.minimum(unit.first, count), 0)
        last = gl.where(unit.is_part, gl.minimum(unit.last, count), gl.where(split, 0, count))
        start += first
        count = last - first
        partial = gl.minimum(gl.maximum(partial - first, 0), count)
        i_row = gl.where(split, q_blocks, i_row)
    return i_row, start, count, partial


@gluon.jit
def store_output(
    p_sums, slot, acc, CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr
):
    """Store the output of a part from column FIRST on, if the unit is a part: (slots, rows of the program, D) fp32."""
    ROWS: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = acc.type.layout
    if slot >= 0:
        rows = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        at = rows[:, None] * D + (FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)))[None, :]
        gl.store(p_sums + slot.to(gl.int64) * (CONSUMERS * ROWS * D) + at, acc)


@gluon.jit
def store_part(
    p_sums, slot, x, WHICH: gl.constexpr, first_key, KV_BLOCK: gl.constexpr, D: gl.constexpr, FIRST: gl.constexpr
):
    """Store a part's unscaled dk (WHICH 0) or dv (WHICH 1) from column FIRST on: (slots, 2, KV_BLOCK, D) fp32."""
    layout: gl.constexpr = x.type.layout
    keys = first_key + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    at = keys[:, None] * D + (FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout)))[None, :]
    gl.store(p_sums + (slot.to(gl.int64) * 2 + WHICH) * (KV_BLOCK * D) + at, x)
