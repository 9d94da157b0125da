# SPDX-License-Identifier: Apache-2.0
"""Capture q and k of every attention layer of one dense forward pass, through transformers' extension points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.perplexity import check_finite, evaluating, routed

CAPTURE = "dynaxx_capture"  # name in transformers' AttentionInterface
HIDDEN = -1e4  # score of a hidden pair; its exp is 0, and 0 * score is 0


@dataclass(frozen=True)
class LayerAttention:
    """The inputs of one attention layer after its rotary embedding."""

    layer: int
    q: Tensor  # (N, H, D) the model's dtype
    k: Tensor  # (N, H, D) one per q head (a view: kv heads are not copied)
    scale: float
    mask: Tensor | None  # (N, N) bool, True = visible, or None for plain causal
    window: int | None  # the layer's sliding window in tokens
    softcap: float | None

    def only(self, heads: Sequence[int]) -> LayerAttention:
        """Return the layer with a subset of its q heads."""
        return replace(self, q=self.q[:, list(heads)], k=self.k[:, list(heads)])


Visitor = Callable[[LayerAttention], None]
_visitor: ContextVar[tuple[Visitor, set[int]] | None] = ContextVar("dynaxx_capture", default=None)


@torch.no_grad()
def visit_attention(model: Any, input_ids: Tensor, visit: Visitor) -> None:
    """Run one dense forward pass, and call `visit` with q and k of every attention layer in order.

    The function uses transformers' `AttentionInterface` and `AttentionMaskInterface`. It restores the model's attention
    and training mode afterwards, also after an error. Nothing is stored from one layer to the next.

    Args:
        model: a causal language model of transformers.
        input_ids: (1, N) int64, one unpadded text.
        visit: a function that is called once per layer.

    Raises:
        ValueError: the attention of the model cannot be set, is more than a softmax of q and k (learned sinks, a
            position bias), or is not causal; or queries or keys are not finite.
    """
    seen: set[int] = set()
    with routed(model, CAPTURE, _capture), evaluating(model):
        token = _visitor.set((visit, seen))
        try:
            model.base_model(input_ids.to(model.device), use_cache=False)  # no lm head: logits would be N x vocabulary
        finally:
            _visitor.reset(token)
    if not seen:
        raise ValueError(
            f"{type(model).__name__} does not call its attention through transformers' AttentionInterface, "
            "so its maps cannot be read"
        )


def _capture(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call the visitor, then attend as the model would, by "sdpa", or by "eager" with a softcap.

    query has shape (1, H, N, D), key and value (1, kv_heads, N, D).
    """
    current = _visitor.get()
    if current is None:
        raise RuntimeError(f"the attention {CAPTURE!r} works only inside `visit_attention`")
    visit, seen = current
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention maps of a model that uses `{name}` are not supported")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"attention maps are for causal attention, and {type(module).__name__} is not causal")
    check_finite(query, f"queries of layer {module.layer_idx}")
    check_finite(key, f"keys of layer {module.layer_idx}")
    group_size = query.shape[1] // key.shape[1]
    scale = kwargs.get("scaling")
    seen.add(module.layer_idx)
    visit(
        LayerAttention(
            layer=module.layer_idx,
            q=query[0].transpose(0, 1),
            k=key[0].unsqueeze(1).expand(-1, group_size, -1, -1).flatten(0, 1).transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=None if attention_mask is None else attention_mask[0, 0],
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
        )
    )
    return _attend(query, key, value, attention_mask, scale, kwargs.get("softcap")), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, softcap: float | None
) -> Tensor:
    """Compute dense attention, (1, N, H, D)."""
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)
    outs = []
    for head in range(query.shape[1]):
        kv = head // (query.shape[1] // key.shape[1])
        scores = attention_scores(query[0, head].float(), key[0, kv].float(), scale or query.shape[-1] ** -0.5, softcap)
        visible = torch.ones_like(scores, dtype=torch.bool).tril() if mask is None else mask[0, 0]
        outs.append(scores.masked_fill_(~visible, HIDDEN).softmax(-1) @ value[0, kv].float())
    return torch.stack(outs, dim=1)[None].to(value.dtype)


def attention_scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute scores before the softmax, (..., N, M); `softcap` as in Gemma 2."""
    scores = (q * scale) @ k.transpose(-1, -2)
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
