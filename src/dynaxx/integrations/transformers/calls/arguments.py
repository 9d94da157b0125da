# SPDX-License-Identifier: Apache-2.0
"""`AttentionCall`: an attention call as transformers makes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

SINKS = ("s_aux", "sinks")  # the names of learned sinks


class AttentionCall(NamedTuple):
    """An attention call as transformers makes it; see `AttentionInterface`."""

    module: nn.Module
    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hk, Lk, D)
    v: Tensor  # (B, Hk, Lk, E)
    mask: Tensor | None  # (B | 1, 1, Lq, Lk), or None for a plain causal call
    kwargs: dict[str, Any]


def is_causal(call: AttentionCall) -> bool:
    """Return whether SDPA attends causally if it gets no mask."""
    asked = call.kwargs.get("is_causal")
    return bool(getattr(call.module, "is_causal", True) if asked is None else asked)


def sinks_of(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the learned sinks of a call, (q_heads,), or None."""
    found: Tensor | None = kwargs.get(SINKS[0])
    return kwargs.get(SINKS[1]) if found is None else found
