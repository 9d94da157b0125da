# SPDX-License-Identifier: Apache-2.0
"""`merge_states`: combine attention results over disjoint sets of keys into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.ops.attention import SparseAttentionOutput


@typed
def merge_states(states: Sequence[tuple[Tensor, Tensor]]) -> SparseAttentionOutput:
    """Merge partial results `(out, lse)` into the result of attending to all their keys at once.

    Args:
        states: pairs of out (batch, seqlen_q, q_heads, head_dim_v) and lse (batch, q_heads, seqlen_q), computed over
            disjoint sets of keys; packed tensors have no batch dimension.

    Returns:
        (out, lse). A query that sees nothing in any state has out = 0 and lse = -inf. Differentiable.

    Raises:
        ValueError: `states` is empty, or shapes differ.
    """
    if not states:
        raise ValueError("`states` must contain at least one (out, lse)")
    for out, lse in states:
        fits = out.ndim in (3, 4) and lse.shape == (*out.shape[:-3], out.shape[-2], out.shape[-3])
        if out.shape != states[0][0].shape or not fits:
            raise ValueError(
                "`states` must agree in shape: out (batch, seqlen_q, q_heads, head_dim_v) and lse (batch, q_heads, "
                f"seqlen_q), without batch if packed, got out {tuple(out.shape)} and lse {tuple(lse.shape)}"
            )
    outs = torch.stack([out for out, _ in states])
    lses = torch.stack([lse for _, lse in states])
    nothing = (lses == -torch.inf).all(0)
    finite = lses.masked_fill(nothing, 0.0)
    lse = finite.logsumexp(0)
    weights = (finite - lse).exp().masked_fill(nothing, 0.0)
    merged = (outs * weights.transpose(-1, -2)[..., None]).sum(0).to(outs.dtype)
    return SparseAttentionOutput(merged, lse.masked_fill(nothing, -torch.inf))
