# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: one logit per head that is added to the denominator of every softmax and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a key with score `sinks` and value zero to a result; equal to `merge_states` with (0, sinks).

    Adding sinks only scales a result by exp(lse before - lse after), so a backend may call this function at its end.

    Args:
        out: (batch, seqlen_q, q_heads, head_dim_v).
        lse: (batch, q_heads, seqlen_q) fp32 (or fp64), -inf for queries that see nothing.
        sinks: (q_heads,), floating point.

    Returns:
        (out, lse) in the given dtypes; lse = sink for queries that see nothing else. Differentiable in all arguments.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    nothing = lse == -torch.inf
    finite = lse.masked_fill(nothing, 0.0)  # avoids inf - inf, forward and backward
    share = (finite - sinks).sigmoid().masked_fill(nothing, 0.0)
    lse = torch.where(nothing, sinks, finite.logaddexp(sinks))
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), lse


def include_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Like `add_sinks`, for a result without autograd history: overwrite `out`, and return it with the new lse."""
    sinks = sinks.detach().to(lse.dtype)[:, None]
    share = (lse - sinks).sigmoid_().masked_fill_(lse == -torch.inf, 0.0)
    return out.mul_(share.transpose(1, 2)[..., None]), lse.logaddexp(sinks)


def sink_gradient(do: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, (q_heads,), from results that include them.

    With the sink's weight p = exp(sink - lse), the gradient is the sum of p (dlse - do . out) over all queries.

    Args:
        do: (batch, seqlen_q, q_heads, head_dim_v), or None for zero.
        dlse: (batch, q_heads, seqlen_q), or None for zero.
        out: (batch, seqlen_q, q_heads, head_dim_v).
        lse: (batch, q_heads, seqlen_q).
        sinks: (q_heads,).
    """
    weights = (sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    gained = torch.zeros_like(lse) if dlse is None else dlse
    if do is not None:
        gained = gained - (do.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return (weights * gained).sum((0, 2)).to(sinks.dtype)
