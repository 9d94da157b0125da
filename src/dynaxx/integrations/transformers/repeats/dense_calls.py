# SPDX-License-Identifier: Apache-2.0
"""Dense calls that equal layers of a pass repeat without planning.

In a pass that is certain to be dense, the outcome of a kind of layer is also kept for later passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, Signature
from dynaxx.integrations.transformers.masks.lazy import has_own_pattern
from dynaxx.integrations.transformers.repeats.keep import Attended, keep

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
    plain: Tensor | None  # the mask that the original attention expects
    outcome: Outcome
    form: DenseForm
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
    """Keep a call that was planned dense, and for later passes its outcome, if this pass is certain to be dense."""
    assert planned.reason is not None, "a dense call has a reason"
    assert planned.plain is not None, "its mask was made"
    outcome = planned.reason, planned.phase
    if current.is_dense:
        known = current.deployed.outcomes
        if len(known) >= MOST_OUTCOMES:
            known.clear()
        known[_outcome_key(current, form)] = outcome
    _keep(current, layer, form, planned.plain, outcome)


def dense_call(current: ForwardContext, layer: Layer, call: AttentionCall, form: Signature) -> DenseCall | None:
    """Return the call of a dense pass, if an earlier pass had the same; None if it must be planned."""
    outcome = None if form.scores.need_eager else current.deployed.outcomes.get(_outcome_key(current, form))
    if outcome is None:
        return None
    plain = layer.dense.plain(call, causal=form.causal, need_eager=False)
    return _keep(current, layer, form, plain, outcome)


def _keep(current: ForwardContext, layer: Layer, form: Signature, plain: PlainMask, outcome: Outcome) -> DenseCall:
    """Return the model's original attention as a `DenseCall`, kept for equal layers of the pass."""
    kind = DenseForm(plain.name, form.device.type, form.seqlen_q, form.seqlen_k)
    found = DenseCall(layer.dense.by_name[plain.name], plain.mask, outcome, kind)
    keep(current, layer, form, found)
    return found


def _outcome_key(current: ForwardContext, form: Signature) -> Hashable:
    """Return what an outcome depends on in passes that are certain to be dense, whatever the number of keys."""
    mask = None if form.mask is None else form.mask[0]()
    own = has_own_pattern(mask) or form.scores.window is not None
    return form.kind, form.seqlen_q, own, form.scores.unserved, current.blocked
