# SPDX-License-Identifier: Apache-2.0
"""Shared by the backward kernels: lse and delta of queries, weights recomputed from scores, softcap slopes."""

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.gpu.primitives import LOG2E, exp_rounded
from dynaxx.kernels.triton.primitives.tiles import tanh

ROWS_MULTIPLE = 128  # so that a block of queries has all its rows


@triton.jit
def load_row_values(p_values, positions, seqlen):
    """Load `row_values` as the dq kernel stored them; queries past the end get lse = inf: their weights vanish."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_values + positions * 2, mask=inside, other=float("inf"))
    return lse, tl.load(p_values + positions * 2 + 1, mask=inside, other=0.0)


@triton.jit
def in_registers(x):
    """Return an fp32 tile in the register layout of Hopper's left operand, unchanged.

    Products then need not reload it, and a thread holds most of a row's numbers. Adding it to a product with zeros
    forces that layout; Triton would keep the tile in shared memory otherwise.
    """
    left, right = tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype)
    return tl.dot(left, right, x.to(tl.float32))


@triton.jit
def load_lse(p_lse, p_dlse, positions, stride_dln, seqlen):
    """Load lse and its gradient of a head's queries, [len(positions)]; -inf and 0 past the end."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_lse + positions, mask=inside, other=float("-inf"))
    return lse, tl.load(p_dlse + positions * stride_dln, mask=inside, other=0.0)


@triton.jit
def row_values(lse, dlse, wide_do, b_out, EXACT: tl.constexpr):
    """Return lse and delta = rowsum(do * out) - dlse of a head's queries, [len(lse)] fp32.

    lse is in base 2 for half precision. A query that sees nothing, or past the end, gets inf and 0: its weights and
    gradients vanish.
    """
    seen = lse != float("-inf")
    delta = tl.sum(wide_do * b_out.to(tl.float32), 1) - dlse.to(tl.float32)
    if not EXACT:
        lse = lse * LOG2E
    return tl.where(seen, lse, float("inf")), tl.where(seen, delta, 0.0)


@triton.jit
def weights_of(scores, lse, scale, EXACT: tl.constexpr):
    """Return exp(scores * scale - lse), in base 2 as lse is, unless the rounding of both terms would show."""
    weights = exp_rounded(scores * scale - lse) if EXACT else tl.exp2(scores * (scale * LOG2E) - lse)
    return weights


@triton.jit
def cap_scores(scores, cap, CAPPED: tl.constexpr):
    """Return capped scores, and the factor of their gradients."""
    slope = 1.0
    if CAPPED:
        bent = tanh(scores / cap)
        scores, slope = cap * bent, 1.0 - bent * bent
    return scores, slope


def empty_rows(lse: Tensor) -> Tensor:
    """Allocate two fp32 numbers per query: (B, Hq, N rounded up to `ROWS_MULTIPLE`, 2)."""
    batch, q_heads, seqlen_q = lse.shape
    return lse.new_empty(batch, q_heads, -(-seqlen_q // ROWS_MULTIPLE) * ROWS_MULTIPLE, 2)
