# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the kernels for latent attention (MLA): listed tokens, and copies of rows to shared memory.

Rows have 576 numbers: WIDE, which are the values too, and REST.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.compat import copy_to_shared

ROWS = gl.constexpr(64)  # q heads of a program
WIDE, REST = gl.constexpr(512), gl.constexpr(64)  # columns of keys: those that are values too, and the others
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # a warp copies 128 bytes of 4 rows at once


@gluon.jit
def listed_tokens(p_list, i_tile, slots, KEYS: gl.constexpr, layout: gl.constexpr):
    """Return the tokens of tile `i_tile` of a list, -1 for none, [KEYS]."""
    place = i_tile * KEYS + gl.arange(0, KEYS, layout)
    return gl.load(p_list + place, mask=place < slots, other=-1)


@gluon.jit
def copy_rows(buffer, p_x, row, there, FIRST: gl.constexpr, layout: gl.constexpr):
    """Start copying columns of rows to a buffer, from column FIRST on; rows that are not `there` become zero.

    Args:
        buffer: [rows, columns].
        p_x: where rows begin.
        row: int64 offsets of the rows, [rows].
        there: which rows exist, [rows].
        FIRST: column.
        layout: layout of the copy.
    """
    column = FIRST + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    copy_to_shared(buffer, p_x + row[:, None] + column[None, :], mask=there[:, None])


@gluon.jit
def copy_heads(buffer, p_x, t, i_part, group_size, strides, FIRST: gl.constexpr):
    """Start copying columns of the q heads of a query, from column FIRST on."""
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, GATHERED))
    copy_rows(buffer, p_x + t * strides.n, head.to(gl.int64) * strides.h, head < group_size, FIRST, GATHERED)
