# SPDX-License-Identifier: Apache-2.0
"""A pass keeps its calls for equal layers by their `Signature`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.calls.arguments import Signature
    from dynaxx.integrations.transformers.calls.layer import Layer
    from dynaxx.integrations.transformers.forward_context import ForwardContext
    from dynaxx.integrations.transformers.repeats.dense_calls import DenseCall
    from dynaxx.integrations.transformers.repeats.prepared import RepeatedCall, RepeatedStep

Attended = tuple[Tensor, Tensor | None]


def keep(current: ForwardContext, layer: Layer, form: Signature, kept: DenseCall | RepeatedCall | RepeatedStep) -> None:
    """Keep a call for equal layers, after counting those of a kept call that it replaces."""
    before = current.repeats.get(form)
    if before is not None:
        before.count(layer.handle.counts)
    current.repeats[form] = kept
