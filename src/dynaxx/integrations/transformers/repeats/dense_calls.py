# SPDX-License-Identifier: Apache-2.0
"""Dense calls that equal layers of a pass repeat without planning.

In a pass that is certain to be dense, the outcome of a kind of layer is also kept for later passes. In a mixed pass,
whose other calls may be sparse, only calls with an equal plan are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, sinks_of
from dynaxx.integrations.transformers.masks.lazy import has_own_pattern
from dynaxx.integrations.transformers.repeats.keys import Attended, keep, may_repeat, plan_key

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.calls.dense_fallback import PlainMask
    from dynaxx.integrations.transformers.calls.layer import Layer
    from dynaxx.integrations.transformers.calls.planning import CallPlan
    from dynaxx.integrations.transformers.forward_context import ForwardContext

MOST_OUTCOMES = 1024

Outcome = tuple[DenseReason, str]  # reason and phase


class DenseForm(NamedTuple):
    """The form of a dense call."""

    name: str  # of the attention, "sdpa" or "eager"
    device: str
    seqlen_q: int
    seqlen_k: int


@dataclass(slots=True)
class DenseCall:
    """The model's original attention, repeated by equal layers of a pass."""

    attention: Callable[..., Any]
    mask: Tensor | None  # the mask of transformers, kept so that its id stays unique
    plain: Tensor | None  # the mask that the original attention expects
    dtype: torch.dtype  # dtype of the queries
    outcome: Outcome
    form: DenseForm
    plan_key: Hashable = None  # see `plan_key`; None if every call of the pass is certain to be dense
    calls: int = 0

    def run(
        self, current: ForwardContext, module: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the call must be planned."""
        if q.dtype is not self.dtype or not _sdpa_computes(kwargs):
            return None
        if self.plan_key is not None and self.plan_key != plan_key(q, k, kwargs):
            return None
        self.calls += 1
        found: Attended = self.attention(module, q, k, v, self.plain, **kwargs)
        return found

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        counts.dense(*self.outcome, self.calls)


def keep_in_dense_pass(current: ForwardContext, layer: Layer, call: AttentionCall, planned: CallPlan) -> None:
    """Keep a call that was planned in a pass that is certain to be dense, and its outcome for later passes."""
    assert planned.reason is not None, "a dense call has a reason"
    assert planned.plain is not None, "its mask was made"
    outcome = planned.reason, planned.phase
    known = current.deployed.outcomes
    if len(known) >= MOST_OUTCOMES:
        known.clear()
    known[_outcome_key(current, layer, call)] = outcome
    _keep(current, layer, call, planned.plain, outcome)


def keep_in_mixed_pass(current: ForwardContext, layer: Layer, call: AttentionCall, planned: CallPlan) -> None:
    """Keep a call that was planned dense in a pass whose other calls may be sparse, for calls with an equal plan."""
    if planned.reason is None or planned.plain is None or not may_repeat(call):
        return
    key = plan_key(call.q, call.k, call.kwargs)
    _keep(current, layer, call, planned.plain, (planned.reason, planned.phase), key)


def dense_call(current: ForwardContext, layer: Layer, call: AttentionCall) -> DenseCall | None:
    """Return the call of a dense pass, if an earlier pass had the same; None if it must be planned."""
    outcome = current.deployed.outcomes.get(_outcome_key(current, layer, call))
    if outcome is None or not _sdpa_computes(call.kwargs):
        return None
    plain = layer.dense.plain(call.mask, call.q.dtype, need_eager=False)
    return _keep(current, layer, call, plain, outcome)


def _keep(
    current: ForwardContext,
    layer: Layer,
    call: AttentionCall,
    plain: PlainMask,
    outcome: Outcome,
    plan_key: Hashable = None,
) -> DenseCall:
    """Return the model's original attention as a `DenseCall`, kept for equal layers of the pass."""
    form = DenseForm(plain.name, call.q.device.type, call.seqlen_q, call.seqlen_k)
    attention = layer.dense.by_name[plain.name]
    found = DenseCall(attention, call.mask, plain.mask, call.q.dtype, outcome, form, plan_key)
    keep(current, layer, call, found)
    return found


def _outcome_key(current: ForwardContext, layer: Layer, call: AttentionCall) -> Hashable:
    own = has_own_pattern(call.mask) or call.kwargs.get("sliding_window") is not None
    return current.deployed.kind(layer.index), call.seqlen_q, own, current.blocked


def _sdpa_computes(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("softcap") is None and sinks_of(kwargs) is None
