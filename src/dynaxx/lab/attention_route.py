# SPDX-License-Identifier: Apache-2.0
"""Route a model's attention through another function within a block, by transformers' extension points."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def routed(model: Any, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """Let `attend` compute attention within the block, and restore the model's attention afterwards.

    Args:
        model: a transformers model.
        name: the name under which the function is registered in `AttentionInterface`, and in `AttentionMaskInterface`
            with SDPA's masks. Without the latter, masks would arrive as None.
        attend: a function (module, query, key, value, attention_mask, **kwargs) -> (out, None).
    """
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(name, attend)
    masking.AttentionMaskInterface.register(name, masking.sdpa_mask)
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in eval mode within the block, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
