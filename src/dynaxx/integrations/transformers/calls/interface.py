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
from dynaxx.integrations.transformers.compiled import ATTRIBUTE, TracedLayer, attend_compiled
from dynaxx.integrations.transformers.decoder import NAME, before_of, implementation
from dynaxx.integrations.transformers.forward_context import ARGUMENT, ForwardContext

LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()


def original_of(module: nn.Module) -> DenseAttention:
    """Return the original attention of a module under a handle, or of a copy of such a module."""
    traced = getattr(module, ATTRIBUTE, None)
    return traced.dense if isinstance(traced, TracedLayer) else DenseAttention(module, before_of(module.config))


def name_before(module: nn.Module) -> str:
    """Return the name of a module's attention, or of the original one, also of a copy of a module under a handle."""
    return original_of(module).name if implementation(module) == NAME else before_of(module.config)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, with the signature of `AttentionInterface`: the pass, the tracer or the layer decides how."""
    if torch.compiler.is_compiling():
        kwargs.pop(ARGUMENT, None)  # from the hook of a decoder that is compiled layer by layer
        traced = getattr(module, ATTRIBUTE, None)
        if not isinstance(traced, TracedLayer):
            return original_of(module)(module, query, key, value, attention_mask, **kwargs)
        out = attend_compiled(traced, query, key, value, attention_mask, kwargs)
        if out is not None:
            return out, None
        return traced.attend_dense(module, query, key, value, attention_mask, kwargs)
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace: the code that it makes knows no handle
        kwargs.pop(ARGUMENT, None)
        return original_of(module)(module, query, key, value, attention_mask, **kwargs)
    current: ForwardContext | None = kwargs.pop(ARGUMENT, None)
    layer = LAYERS.get(module)
    if layer is None:  # a copy of a model with a policy, or one that shares its config
        warn_once(f"{type(module).__name__} asks for dynaxx attention but has no handle, so it runs dense")
        return original_of(module)(module, query, key, value, attention_mask, **kwargs)
    return layer.attend(current, AttentionCall(module, query, key, value, attention_mask, kwargs))
