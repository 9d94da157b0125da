# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of decode/forward.py: queries of a list, tiles of a cache, parts. Shapes are defined there."""

import triton
import triton.language as tl

from dynaxx.kernels.triton.primitives.conversion import halved


@triton.jit
def load_tile(p_tile, inside, within, WHOLE: tl.constexpr):
    """Load a tile of a cache; zero outside the sequence and head_dim."""
    return tl.load(p_tile, mask=inside if WHOLE else inside & within, other=0.0)


@triton.jit
def load_queries(p_q, q_strides, i_b, i_h, row, rows, group_size, HALF: tl.constexpr, D: tl.constexpr, o_d):
    """Load the rows of a list, transposed, [BLOCK_D, BLOCK_M], and the factor for their scores."""
    p_row = p_q + i_b * q_strides.b + (row // group_size).to(tl.int64)[:, None] * q_strides.n
    p_row += (i_h * group_size + row % group_size)[:, None] * q_strides.h
    b_q = tl.load(p_row + o_d[None, :], mask=(row < rows)[:, None] & (o_d < D)[None, :], other=0.0)
    q_scale = tl.full(row.shape, 1.0, tl.float32)
    if HALF:
        b_q, q_scale = halved(b_q)
    return tl.trans(b_q), q_scale


@triton.jit
def store_part(p_acc, p_state, part, acc, acc_odd, row_max, row_sum, known, o_e, E: tl.constexpr, PAIRS: tl.constexpr):
    """Store the first `known` rows of a part."""
    acc = tl.trans(acc)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, tl.trans(acc_odd)), (acc.shape[0], 2 * acc.shape[1]))
    tl.store(p_acc + part[:, None] * E + o_e[None, :], acc, mask=known[:, None] & (o_e < E)[None, :])
    tl.store(p_state + part * 2, row_max, mask=known)
    tl.store(p_state + part * 2 + 1, row_sum, mask=known)
