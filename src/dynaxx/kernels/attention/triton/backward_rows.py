# SPDX-License-Identifier: Apache-2.0
"""Helpers of the backward kernels: lse and delta of queries, weights recomputed from scores, softcap derivatives."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.primitives.numbers import LOG2E, exp_rounded, tanh
from dynaxx.kernels.primitives.triton.bias import bias_arguments
from dynaxx.kernels.runtime.arguments import strides_of
from dynaxx.layout import BlockLayout

ROWS_MULTIPLE = 128  # a multiple of every q block, so that each block has all its rows


@triton.jit
def load_row_values(p_values, positions, seqlen):
    """Load lse and delta that the dq kernel stored; queries past the end get lse = inf, so their weights are 0."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_values + positions * 2, mask=inside, other=float("inf"))
    return lse, tl.load(p_values + positions * 2 + 1, mask=inside, other=0.0)


@triton.jit
def in_registers(x):
    """Return an fp32 tile in the register layout of Hopper's left operand, unchanged.

    Products then need not reload it, and a thread holds most numbers of a row. Adding the tile to a product with zeros
    forces this layout; otherwise Triton would keep the tile in shared memory.
    """
    left, right = tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype)
    return tl.dot(left, right, x.to(tl.float32))


@triton.jit
def load_lse(p_lse, p_dlse, positions, stride_dln, seqlen):
    """Load lse and its gradient for a head's queries, [len(positions)]; -inf and 0 past the end."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_lse + positions, mask=inside, other=float("-inf"))
    return lse, tl.load(p_dlse + positions * stride_dln, mask=inside, other=0.0)


@triton.jit
def row_values(lse, dlse, wide_do, b_out, EXACT: tl.constexpr):
    """Return lse and delta = rowsum(do * out) - dlse for a head's queries, [len(lse)] fp32.

    lse is in base 2 for half precision. Queries that see nothing, and queries past the end, get inf and 0, so that
    their weights and gradients are 0.
    """
    seen = lse != float("-inf")
    delta = tl.sum(wide_do * b_out.to(tl.float32), 1) - dlse.to(tl.float32)
    if not EXACT:
        lse = lse * LOG2E
    return tl.where(seen, lse, float("inf")), tl.where(seen, delta, 0.0)


@triton.jit
def weights_of(scores, lse, scale, EXACT: tl.constexpr):
    """Return exp(scores * scale - lse). Uses base 2, like lse, unless EXACT, where the rounding would be visible."""
    weights = exp_rounded(scores * scale - lse) if EXACT else tl.exp2(scores * (scale * LOG2E) - lse)
    return weights


@triton.jit
def cap_scores(scores, cap, CAPPED: tl.constexpr):
    """Return capped scores and the factor for their gradients."""
    slope = 1.0
    if CAPPED:
        bent = tanh(scores / cap)
        scores, slope = cap * bent, 1.0 - bent * bent
    return scores, slope


def empty_rows(lse: Tensor) -> Tensor:
    """Allocate two fp32 numbers per query: (B, Hq, N rounded up to `ROWS_MULTIPLE`, 2)."""
    batch, q_heads, seqlen_q = lse.shape
    return lse.new_empty(batch, q_heads, -(-seqlen_q // ROWS_MULTIPLE) * ROWS_MULTIPLE, 2)


def shared_arguments(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> dict[str, Any]:
    """Return the arguments that the kernels share."""
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    return {
        "seqlen_q": seqlen_q,
        "padded_q": values.shape[2],
        "seqlen_k": seqlen_k,
        "batch": batch,
        "q_heads": q_heads,
        "group_size": q_heads // kv_heads,
        "scale": scale,
        "cap": softcap / scale if softcap and scale else 1.0,
        "CAPPED": softcap is not None and scale != 0,
        "do_strides": strides_of(do),
        "q_strides": strides_of(q),
        "k_strides": strides_of(k),
        "v_strides": strides_of(v),
        **bias_arguments(bias),
        "D": head_dim,
        "E": head_dim_v,
        "BLOCK_D": padded(head_dim),
        "BLOCK_E": padded(head_dim_v),
        "Q_BLOCK": layout.block_size[0],
        "KV_BLOCK": layout.block_size[1],
    }
