# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the kernels for latent attention (MLA): listed tokens, and copies of rows to shared memory.

Rows have 576 numbers, in two buffers: WIDE, which are the values too, and REST.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

ROWS = gl.constexpr(64)  # q heads of a program
WIDE, REST = gl.constexpr(512), gl.constexpr(64)  # columns of keys: those that are values too, and the others
TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def listed_tokens(p_list, i_tile, slots, KEYS: gl.constexpr, layout: gl.constexpr):
    """Return the tokens of tile `i_tile` of a list, -1 for none, [KEYS]."""
    place = i_tile * KEYS + gl.arange(0, KEYS, layout)
    return gl.load(p_list + place, mask=place < slots, other=-1)


@gluon.jit
def listed_rows(p_list, i_tile, slots, KEYS: gl.constexpr, WIDE_ROWS: gl.constexpr, REST_ROWS: gl.constexpr):
    """Return the tokens of tile `i_tile` of a list twice: as rows of the wide buffer and of the other."""
    wide = listed_tokens(p_list, i_tile, slots, KEYS, gl.SliceLayout(1, WIDE_ROWS))
    return wide, listed_tokens(p_list, i_tile, slots, KEYS, gl.SliceLayout(1, REST_ROWS))


@gluon.jit
def copy_keys(k_wide, k_rest, p_k, tokens, last, k_strides, WIDE_ROWS: gl.constexpr, REST_ROWS: gl.constexpr):
    """Start copying the rows of keys to two buffers; rows of missing tokens become zero.

    Args:
        k_wide: buffer [KEYS, WIDE].
        k_rest: buffer [KEYS, REST].
        p_k: keys of the sequence.
        tokens: result of `listed_rows`.
        last: last token that the query sees.
        k_strides: strides of the keys.
        WIDE_ROWS: layout of a copy to the first buffer.
        REST_ROWS: layout of a copy to the second buffer.
    """
    key_wide, key_rest = tokens
    o_wide = gl.arange(0, WIDE, gl.SliceLayout(0, WIDE_ROWS))
    o_rest = WIDE + gl.arange(0, REST, gl.SliceLayout(0, REST_ROWS))
    there_wide, there_rest = (key_wide >= 0) & (key_wide <= last), (key_rest >= 0) & (key_rest <= last)
    row_wide, row_rest = gl.where(there_wide, key_wide, 0), gl.where(there_rest, key_rest, 0)
    p_wide = p_k + (row_wide.to(gl.int64) * k_strides.n)[:, None] + o_wide[None, :]
    p_rest = p_k + (row_rest.to(gl.int64) * k_strides.n)[:, None] + o_rest[None, :]
    async_copy.async_copy_global_to_shared(k_wide, p_wide, mask=there_wide[:, None])
    async_copy.async_copy_global_to_shared(k_rest, p_rest, mask=there_rest[:, None])


@gluon.jit
def copy_heads(tile, p_x, t, i_part, group_size, strides, FIRST: gl.constexpr, layout: gl.constexpr):
    """Copy columns of the q heads of a query to shared memory, from column FIRST on."""
    COLUMNS: gl.constexpr = tile.shape[1]
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    p_rows = p_x + t * strides.n + head.to(gl.int64)[:, None] * strides.h + column[None, :]
    tile.store(gl.load(p_rows, mask=(head < group_size)[:, None], other=0.0))
