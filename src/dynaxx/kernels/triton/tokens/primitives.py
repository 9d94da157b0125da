# SPDX-License-Identifier: Apache-2.0
"""What the kernels over chosen tokens share: lists of keys, rows that lie anywhere, and scores.

Rows are cut into a part whose width is a power of two and a rest (576 = 512 + 64), so that latent attention wastes no
half of a tile. D / E head_dim of q and k, and of v; _A and _B are widths of the two parts, B = 0 for no rest.
"""

import triton
import triton.language as tl

from dynaxx.kernels.triton.primitives.tiles import tanh


@triton.jit
def chosen_keys(p_chosen, first, slots, position, GRAIN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return keys [BLOCK_N] of a query's list from place `first` on, and which of them are there and visible."""
    place = first + tl.arange(0, BLOCK_N)
    slot = place // GRAIN
    block = tl.load(p_chosen + slot, mask=slot < slots, other=-1)
    key = block * GRAIN + place % GRAIN
    visible = (block >= 0) & (block <= position) & (key <= position)  # a product that overflows is none
    return tl.where(visible, key, 0), visible


@triton.jit
def row_parts(p_rows, mask, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr):
    """Return rows of pointers [R] as tiles [R, D_A] and [R, max(D_B, 16)]; zeros where masked and behind D."""
    o_a = tl.arange(0, D_A)
    b_a = tl.load(p_rows[:, None] + o_a[None, :], mask=mask[:, None] & (o_a < D)[None, :], other=0.0)
    if D_B:
        o_b = D_A + tl.arange(0, D_B)
        b_b = tl.load(p_rows[:, None] + o_b[None, :], mask=mask[:, None] & (o_b < D)[None, :], other=0.0)
    else:
        b_b = b_a
    return b_a, b_b


@triton.jit
def products(b_a, b_b, c_a, c_b, D_B: tl.constexpr):
    """Return [M, N]: rows of b [M, D] times rows of c [N, D]."""
    result = tl.dot(b_a, tl.trans(c_a), input_precision="ieee")
    if D_B:
        result = tl.dot(b_b, tl.trans(c_b), result, input_precision="ieee")
    return result


@triton.jit
def capped(scores, softcap, CAPPED: tl.constexpr):
    """Return scores, and the slope of the cap at them."""
    if CAPPED:
        inner = tanh(scores / softcap)
        return inner * softcap, 1.0 - inner * inner
    else:
        return scores, scores * 0.0 + 1.0


@triton.jit
def store_parts(p_rows, mask, b_a, b_b, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr):
    """Write tiles of `row_parts` to rows of pointers [R]."""
    o_a = tl.arange(0, D_A)
    element = p_rows.dtype.element_ty
    tl.store(p_rows[:, None] + o_a[None, :], b_a.to(element), mask=mask[:, None] & (o_a < D)[None, :])
    if D_B:
        o_b = D_A + tl.arange(0, D_B)
        tl.store(p_rows[:, None] + o_b[None, :], b_b.to(element), mask=mask[:, None] & (o_b < D)[None, :])
