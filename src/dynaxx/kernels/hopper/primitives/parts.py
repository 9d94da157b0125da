# SPDX-License-Identifier: Apache-2.0
"""Device functions that find a program's part of a long row or column, and store its sums. See `gpu.schedule.split`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WHOLE = gl.constexpr(-1)  # slot of a column that is not split
NOTHING = gl.constexpr(-2)  # slot of a split column, whose parts are computed by other programs
ALL_ENTRIES = gl.constexpr((1 << 31) - 1)


@gluon.jit
def column_length(p_indptr, capacity, layout_stride_b, layout_stride_h, i_b, i_hk, i_col, kv_blocks, group_size):
    """Return the number of entries of a column, over all heads of a group."""
    length = 0
    for i_group in range(group_size):
        lead = (i_b * layout_stride_b + (i_hk * group_size + i_group) * layout_stride_h).to(gl.int64)
        p_column = p_indptr + lead * (kv_blocks + 1) + i_col
        start = gl.minimum(gl.maximum(gl.load(p_column), 0), capacity)
        length += gl.minimum(gl.maximum(gl.load(p_column + 1), start), capacity) - start
    return length


@gluon.jit
def part_or_whole(
    i_program, i_b, i_hk, i_col, p_parts, num_parts, limit, batch_copies, head_copies,
    p_indptr, capacity, layout_stride_b, layout_stride_h, kv_blocks, kv_heads, group_size,
):  # fmt: skip
    """Return batch entry, kv head and column of a program, its first entry and last entry + 1, and its slot.

    Programs for parts come first. The others process their usual column, and do nothing if it is split.
    """
    copies = batch_copies * head_copies
    is_part = i_program < num_parts * copies
    p_part = p_parts + gl.where(is_part, i_program // copies, 0) * 3
    line = gl.load(p_part)
    row_heads = kv_heads // head_copies
    i_copy = i_program % copies
    i_b = gl.where(is_part, line // kv_blocks // row_heads + i_copy // head_copies, i_b)
    i_hk = gl.where(is_part, line // kv_blocks % row_heads + i_copy % head_copies, i_hk)
    i_col = gl.where(is_part, line % kv_blocks, i_col)
    length = column_length(
        p_indptr, capacity, layout_stride_b, layout_stride_h, i_b, i_hk, i_col, kv_blocks, group_size
    )
    slot = gl.where(is_part, i_program, gl.where(length > limit, NOTHING, WHOLE))
    first = gl.where(is_part, gl.load(p_part + 1), 0)
    last = gl.where(is_part, gl.load(p_part + 2), gl.where(length > limit, 0, ALL_ENTRIES))
    return i_b, i_hk, i_col, first, last, slot


@gluon.jit
def row_part(i_unit, p_parts, num_parts, batch_copies, head_copies, q_blocks, units):
    """Return whether a unit of the forward is a part; its batch entry, unit of heads, row, first and last + 1 entry."""
    copies = batch_copies * head_copies
    is_part = i_unit < num_parts * copies
    p_part = p_parts + gl.where(is_part, i_unit // copies, 0) * 3
    line = gl.load(p_part)
    row_units = units // head_copies
    i_b = line // q_blocks // row_units + i_unit % copies // head_copies
    unit = line // q_blocks % row_units + i_unit % head_copies
    return is_part, i_b, unit, line % q_blocks, gl.load(p_part + 1), gl.load(p_part + 2)


@gluon.jit
def store_output(p_sums, slot, acc, CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr):
    """Store the output of a part, if the unit is one: (slots, rows of the program, D) fp32."""
    ROWS: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    if slot >= 0:
        rows = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        at = rows[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
        gl.store(p_sums + slot.to(gl.int64) * (CONSUMERS * ROWS * D) + at, acc)


@gluon.jit
def store_part(p_sums, slot, x, WHICH: gl.constexpr, first_key, KV_BLOCK: gl.constexpr):
    """Store a part's unscaled dk (WHICH 0) or dv (WHICH 1): (slots, 2, KV_BLOCK, D) fp32."""
    ROWS: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    at = keys[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(p_sums + (slot.to(gl.int64) * 2 + WHICH) * (KV_BLOCK * D) + at, x)
