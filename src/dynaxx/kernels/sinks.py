# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a logit per head that takes its share of every softmax, and gives nothing for it."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a key of score `sinks` and value zero to a result: `merge_states` with (0, sinks).

    A result without sinks only shrinks, by exp(lse before - lse after), so a backend may call this at its end.

    Args:
        out: (batch, seqlen_q, q_heads, head_dim_v).
        lse: (batch, q_heads, seqlen_q) fp32 (or fp64), -inf where a query sees nothing.
        sinks: (q_heads,), floating point.

    Returns:
        (out, lse) in the dtypes given, lse = sink where a query sees nothing else. Differentiable in all three.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    nothing = lse == -torch.inf
    finite = lse.masked_fill(nothing, 0.0)  # no inf - inf, forward or backward
    share = (finite - sinks).sigmoid().masked_fill(nothing, 0.0)
    lse = torch.where(nothing, sinks, finite.logaddexp(sinks))
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), lse


def include_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `add_sinks` for a result without autograd history: overwrite `out`, and return it with the new lse."""
    sinks = sinks.detach().to(lse.dtype)[:, None]
    share = (lse - sinks).sigmoid_().masked_fill_(lse == -torch.inf, 0.0)
    return out.mul_(share.transpose(1, 2)[..., None]), lse.logaddexp(sinks)


def sink_gradient(do: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, (q_heads,), from results that include them.

    With the sink's weight p = exp(sink - lse), it is the sum of p (dlse - do . out) over all queries.

    Args:
        do, out: (batch, seqlen_q, q_heads, head_dim_v); do None for none.
        dlse, lse: (batch, q_heads, seqlen_q); dlse None for none.
    """
    weights = (sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
    gained = torch.zeros_like(lse) if dlse is None else dlse
    if do is not None:
        gained = gained - (do.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return (weights * gained).sum((0, 2)).to(sinks.dtype)
