# SPDX-License-Identifier: Apache-2.0
"""Attention of one list to the exact tokens of an 8-bit cache. Shapes are those of decode/forward.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dynaxx.kernels.primitives.numbers import tanh


class ExactSizes(NamedTuple):
    """Constants of `attend_exact`, named as those of the decode kernel."""

    EXACT: Any
    SINKS: Any
    BLOCK_X: Any
    D: Any
    E: Any
    V_LOADED: Any
    PAIRS: Any
    HALF: Any
    PRECISION: Any
    CAPPED: Any
    WINDOW: Any


@triton.jit
def exact_positions(slot, leftpad, seqused, EXACT: tl.constexpr, SINKS: tl.constexpr):
    """Return the token that each exact slot holds, -1 for none; like `ExactTokens.positions`."""
    WINDOW: tl.constexpr = EXACT - SINKS
    back = ((seqused - 1 - slot + SINKS) % WINDOW + WINDOW) % WINDOW
    position = tl.where(slot < SINKS, leftpad + slot, seqused - 1 - back)
    first = tl.where(slot < SINKS, leftpad, leftpad + SINKS)
    return tl.where((slot < EXACT) & (position >= first) & (position < seqused), position, -1)


@triton.jit
def attend_exact(
    p_k, p_v, b_q, q_scale, i_b, i_h, kv_heads, own_position, leftpad, seqused, factor, cap, left, o_d, o_v,
    sizes: tl.constexpr,
):  # fmt: skip
    """Attend from a list's rows to the exact tokens: p_k (B, EXACT, Hk, D) and p_v (B, EXACT, Hk, E).

    Return the sums of values, transposed, with even and odd ones separate if PAIRS; the largest score; the sum of
    weights.
    """
    o_x = tl.arange(0, sizes.BLOCK_X)
    position = exact_positions(o_x, leftpad, seqused, sizes.EXACT, sizes.SINKS)
    there = position >= 0
    slot = (i_b * sizes.EXACT + o_x) * kv_heads + i_h
    b_k = tl.load(
        p_k + slot[:, None] * sizes.D + o_d[None, :], mask=there[:, None] & (o_d < sizes.D)[None, :], other=0.0
    )
    p_values = p_v + slot[None, :] * sizes.E + (o_v * (2 if sizes.PAIRS else 1))[:, None]
    within = there[None, :] & (o_v < sizes.V_LOADED)[:, None]
    b_v = tl.load(p_values, mask=within, other=0.0)  # [BLOCK_V, BLOCK_X]
    b_v_odd = b_v
    if sizes.PAIRS:
        b_v_odd = tl.load(p_values + 1, mask=within, other=0.0)
    if not sizes.HALF:
        b_k, b_v = b_k.to(b_q.dtype), b_v.to(b_q.dtype)
    scores = tl.dot(b_k, b_q.to(b_k.dtype), input_precision=sizes.PRECISION) * q_scale[None, :]
    if sizes.CAPPED:
        scores = cap * tanh(scores / cap)
    visible = there[:, None] & (position[:, None] <= own_position[None, :])
    if sizes.WINDOW:
        visible &= position[:, None] >= own_position[None, :] - left
    scores = tl.where(visible, scores, float("-inf"))
    row_max = tl.max(scores, 0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((scores - shift[None, :]) * factor)
    row_sum = tl.sum(weights, 0)
    weights = weights.to(b_v.dtype)
    acc = tl.dot(b_v, weights, input_precision=sizes.PRECISION)
    acc_odd = acc
    if sizes.PAIRS:
        acc_odd = tl.dot(b_v_odd, weights, input_precision=sizes.PRECISION)
    return acc, acc_odd, row_max, row_sum
