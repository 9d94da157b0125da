# SPDX-License-Identifier: Apache-2.0
"""Keys of attention calls: which calls of a pass are equal, and where a pass keeps them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaxx.integrations.transformers.calls.arguments import HARMLESS, SINKS, AttentionCall

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.calls.layer import Layer
    from dynaxx.integrations.transformers.forward_context import ForwardContext
    from dynaxx.integrations.transformers.repeats.dense_calls import DenseCall
    from dynaxx.integrations.transformers.repeats.prepared import RepeatedCall, RepeatedStep

Attended = tuple[Tensor, Tensor | None]
COMPARED = frozenset({*SINKS, "softcap", "sliding_window", "dropout"})  # other arguments that repeated calls may have


def key_of(current: ForwardContext, module: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> Hashable:
    """Return a key that is equal for calls of a pass with equal layers, masks and windows."""
    return current.deployed.kinds.get(layer_number(module), 0), id(mask), kwargs.get("sliding_window")


def layer_number(module: Any) -> int:
    """Return the number that a module has in its model, or -1 for encoders whose modules have none."""
    found: int = getattr(module, "layer_idx", -1)
    return found


def may_repeat(call: AttentionCall) -> bool:
    """Return whether the options of a call are all known, so that equal ones give equal calls."""
    kwargs = call.kwargs
    others = any(name not in HARMLESS and name not in COMPARED for name in kwargs)
    return not (others or kwargs.get("dropout") or torch.is_autocast_enabled(call.q.device.type))


def keep(
    current: ForwardContext, layer: Layer, call: AttentionCall, kept: DenseCall | RepeatedCall | RepeatedStep
) -> None:
    """Keep a call for equal layers, after counting those of a kept call that it replaces."""
    key = key_of(current, call.module, call.mask, call.kwargs)
    before = current.repeats.get(key)
    if before is not None:
        before.count(layer.handle.counts)
    current.repeats[key] = kept


def plan_key(q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> Hashable:
    """Return what must be equal in calls of a pass that have one plan, besides kind of layer, mask and window."""
    return q.shape, k.shape, tuple(kwargs), options_of(kwargs)


def options_of(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that change a result, besides sinks."""
    get = kwargs.get
    return get("scaling"), get("softcap"), get("is_causal"), get("dropout")
