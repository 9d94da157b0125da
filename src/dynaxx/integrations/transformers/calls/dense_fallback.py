# SPDX-License-Identifier: Apache-2.0
"""Dense fallback: the model's original attention, for whole calls and for single sequences of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.transformers.calls.arguments import SINKS
from dynaxx.integrations.transformers.calls.own_pattern import causal_layout
from dynaxx.integrations.transformers.masks.lazy import plain_mask
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.ops import sparse_attention

Attention = Callable[..., Any]


class PlainMask(NamedTuple):
    """The original attention of a call and the mask that it expects."""

    name: str  # "sdpa" or "eager"
    mask: Tensor | None
    dtype: torch.dtype  # dtype of the scores


class DenseAttention:
    """The original attention of a module, called with the mask that it expects.

    SDPA silently ignores softcap and sinks. Calls with these arguments use the eager attention of the module's file.

    Args:
        module: an attention module of transformers.
        implementation: the name of the model's original attention, "sdpa" or "eager".
    """

    __slots__ = ("by_name", "name")

    def __init__(self, module: nn.Module, implementation: str) -> None:
        self.name = implementation
        self.by_name = {name: attention_of(module, name) for name in {"eager", implementation}}

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the signature of `AttentionInterface`."""
        dropped = bool(kwargs.get("softcap")) or any(kwargs.get(name) is not None for name in SINKS)
        plain = self.plain(mask, q.dtype, need_eager=dropped)
        found: tuple[Tensor, Tensor | None] = self.by_name[plain.name](module, q, k, v, plain.mask, **kwargs)
        return found

    def plain(self, mask: Tensor | None, dtype: torch.dtype, *, need_eager: bool) -> PlainMask:
        """Return the attention for a mask of transformers, and the mask in its form. Equal calls share both."""
        name = "eager" if need_eager else self.name
        return PlainMask(name, plain_mask(mask, name, dtype), dtype)


def attention_of(module: nn.Module, name: str) -> Attention:
    """Return the attention of a module by its name; "eager" is a function of the module's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    file = sys.modules.get(type(module).__module__)
    registry = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    if name != "eager":
        found: Attention = registry[name]
        return found
    return getattr(file, "eager_attention_forward", None) or registry["sdpa"]


def dense_piece(
    q: Tensor, k: Tensor, v: Tensor, run: MaskRun, *, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend densely for one run of a call: (B, heads, n, D) -> (B, n, Hq, D)."""
    if run.seqlen_k == 0:
        return q.new_zeros(q.shape[0], run.seqlen_q, q.shape[1], v.shape[-1])
    square = run.causal and run.seqlen_q == run.seqlen_k
    if softcap is None and sinks is None and (square or not run.causal):
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=square, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)
    layout = causal_layout(run.seqlen_q, run.seqlen_k, q.device, causal=run.causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sparse_attention(q, k, v, layout, scale=scale, softcap=softcap, sinks=sinks)
