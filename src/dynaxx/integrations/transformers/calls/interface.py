# SPDX-License-Identifier: Apache-2.0
"""`attention`: the function that transformers calls in every attention layer of every model with a handle."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.integrations.transformers.calls.arguments import AttentionCall
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.layer import Layer, warn_once
from dynaxx.integrations.transformers.compiled import ATTRIBUTE, attend_compiled
from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.forward_context import ARGUMENT, ForwardContext
from dynaxx.integrations.transformers.repeats.dense_calls import dense_call
from dynaxx.integrations.transformers.repeats.dense_passes import running
from dynaxx.integrations.transformers.repeats.keys import key_of

LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, with the signature of `AttentionInterface`: repeat an equal call, otherwise let the layer plan."""
    if torch.compiler.is_compiling():
        kwargs.pop(ARGUMENT, None)  # from the hook of a decoder that is compiled layer by layer
        traced = getattr(module, ATTRIBUTE, None)
        if traced is None or not traced.name:
            return DenseAttention(module, DENSE)(module, query, key, value, attention_mask, **kwargs)
        out = attend_compiled(traced, query, key, value, attention_mask, kwargs)
        if out is not None:
            return out, None
        return traced.attend_dense(module, query, key, value, attention_mask, kwargs)
    current: ForwardContext | None = None
    dense = running.dense
    if dense is None or dense.config is not module.config:
        current = kwargs.pop(ARGUMENT, None)
        dense = None if current is None else current.dense_pass
    if dense is not None:
        dense.calls += 1
        mask = None if attention_mask is None else dense.plain(attention_mask)
        attended: tuple[Tensor, Tensor | None] = dense.attention(module, query, key, value, mask, **kwargs)
        return attended
    known = None
    if current is not None and current.repeats:
        known = current.repeats.get(key_of(current, module, attention_mask, kwargs))
        found = None if known is None else known.run(current, module, query, key, value, kwargs)
        if found is not None:
            return found
    layer = LAYERS.get(module)
    if layer is None:  # a copy of a model with a policy, or one that shares its config
        warn_once(f"{type(module).__name__} asks for dynaxx attention but has no handle, so it runs dense")
        return DenseAttention(module, DENSE)(module, query, key, value, attention_mask, **kwargs)
    call = AttentionCall(module, query, key, value, attention_mask, kwargs)
    if current is not None and current.is_dense and known is None:
        repeated = dense_call(current, layer, call)
        found = None if repeated is None else repeated.run(current, module, query, key, value, kwargs)
        if found is not None:
            return found
    return layer.attend(current, call)
