"""Attention sinks: a logit per head that takes its share of every softmax, and gives nothing for it."""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a key of score `sinks` and value zero to a result: `merge_states` with (0, sinks).

    No backend needs to know: what it computed without sinks only shrinks, by exp(lse before - lse after).

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
