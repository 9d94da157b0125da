# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of decode/forward.py: queries of a list, tiles of a cache, parts. Shapes are defined there."""

import triton
import triton.language as tl

from dynaxx.kernels.primitives.triton.conversion import halved


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
def sum_of_halves(b_k, b_q, PRECISION: tl.constexpr):
    """Return keys [BLOCK_N, BLOCK_D] times queries [BLOCK_D, BLOCK_M], as the sum of two dots over half of BLOCK_D.

    In fp32 a dot adds one product after another. From 512 products on it rounds more than twice as much as a sum by
    halves. The halves are added by a reduction, because Triton would merge a sum of two dots into one.
    """
    HALF: tl.constexpr = b_k.shape[1] // 2
    k_first, k_second = tl.split(tl.permute(tl.reshape(b_k, [b_k.shape[0], 2, HALF]), [0, 2, 1]))
    q_first, q_second = tl.split(tl.permute(tl.reshape(b_q, [2, HALF, b_q.shape[1]]), [1, 2, 0]))
    first = tl.dot(k_first, q_first, input_precision=PRECISION)
    return tl.sum(tl.join(first, tl.dot(k_second, q_second, input_precision=PRECISION)), 2)


@triton.jit
def store_part(p_acc, p_state, part, acc, acc_odd, row_max, row_sum, known, o_e, E: tl.constexpr, PAIRS: tl.constexpr):
    """Store the first `known` rows of a part."""
    acc = tl.trans(acc)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, tl.trans(acc_odd)), (acc.shape[0], 2 * acc.shape[1]))
    tl.store(p_acc + part[:, None] * E + o_e[None, :], acc, mask=known[:, None] & (o_e < E)[None, :])
    tl.store(p_state + part * 2, row_max, mask=known)
    tl.store(p_state + part * 2 + 1, row_sum, mask=known)
