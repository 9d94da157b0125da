# SPDX-License-Identifier: Apache-2.0
"""Dense calls that equal layers of a pass repeat without planning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, Signature
from dynaxx.integrations.transformers.repeats.keep import Attended, keep

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.calls.layer import Layer
    from dynaxx.integrations.transformers.calls.planning import CallPlan
    from dynaxx.integrations.transformers.forward_context import ForwardContext

Outcome = tuple[DenseReason, str]  # reason and phase


@dataclass(slots=True)
class DenseCall:
    """The model's original attention, repeated by equal layers of a pass."""

    attention: Callable[..., Any]
    plain: Tensor | None  # the mask that the original attention expects
    outcome: Outcome
    calls: int = 0

    def run(self, current: ForwardContext, layer: int, call: AttentionCall) -> Attended:
        """Attend as in `AttentionInterface`."""
        self.calls += 1
        found: Attended = self.attention(call.module, call.q, call.k, call.v, self.plain, **call.kwargs)
        return found

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        counts.dense(*self.outcome, self.calls)


def keep_dense(current: ForwardContext, layer: Layer, form: Signature, planned: CallPlan) -> None:
    """Keep a call that was planned dense."""
    assert planned.reason is not None, "a dense call has a reason"
    plain = planned.plain
    assert plain is not None, "its mask was made"
    attention = layer.dense.by_name[plain.name]
    keep(current, layer, form, DenseCall(attention, plain.mask, (planned.reason, planned.phase)))
