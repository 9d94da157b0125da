# SPDX-License-Identifier: Apache-2.0
"""Attention calls that equal layers of a pass make without planning, found by their `Signature`.

A `DenseCall` repeats the model's original attention, a `RepeatedCall` a prepared call, and a `RepeatedStep` a prepared
decoding step. What else matters, such as measurements and failures, is asked by `run`, which returns None if the call
must be planned. None of them changes a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import DenseReason, Route
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, sinks_of
from dynaxx.integrations.transformers.calls.call_plan import CallPlan
from dynaxx.integrations.transformers.calls.decode import StepTaken, repeat_step
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.forward_context import Attended, ForwardContext, Repeat
from dynaxx.integrations.transformers.passes import Passes
from dynaxx.ops.prepared.layer import LayerReplay, Prepared


@dataclass(slots=True)
class DenseCall:
    """The model's original attention, repeated by equal layers of a pass."""

    attention: Callable[..., Any]
    plain: Tensor | None  # the mask that the original attention expects
    outcome: tuple[DenseReason, str]  # reason and phase
    calls: int = 0

    def run(self, current: ForwardContext, layer: int, call: AttentionCall) -> Attended:
        """Attend as in `AttentionInterface`."""
        self.calls += 1
        found: Attended = self.attention(call.module, call.q, call.k, call.v, self.plain, **call.kwargs)
        return found

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        counts.dense(*self.outcome, self.calls)


class RepeatCondition(NamedTuple):
    """When a layer of the same pass may repeat a call with an equal signature."""

    passes: Passes
    by_rule: bool  # False for the model's own pattern
    measures: bool  # whether telemetry may measure a call of this pass

    @classmethod
    def of(cls, passes: Passes, *, by_rule: bool) -> RepeatCondition:
        """Return the condition for a call that follows a rule or the own pattern."""
        return cls(passes, by_rule, by_rule and passes.counts.probe.may_want())

    def holds(self, current: ForwardContext, layer: int, q: Tensor) -> bool:
        """Return whether a layer may repeat the call: no earlier failure, and no measurement."""
        if self.passes.faults or not current.deployed.breakers[layer].healthy:
            return False
        if self.measures and self.passes.counts.probe.wants(q.device):
            current.measures_next = True
            return False
        return True


@dataclass(slots=True)
class RepeatedCall:
    """A prepared call, which equal layers repeat."""

    condition: RepeatCondition
    prepared: Prepared
    phase: str
    replay: LayerReplay | None = None  # the call of the layer before, if it can be repeated from addresses
    calls: int = 0

    def run(self, current: ForwardContext, layer: int, call: AttentionCall) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the call must be planned."""
        _, q, k, v, _, kwargs = call
        if self.condition.passes.watchers or not self.condition.holds(current, layer, q):
            return None
        sinks = sinks_of(kwargs)
        try:
            out = None if self.replay is None else self.replay(q, k, v, sinks)
            if out is None:
                given = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sinks)
                if not self.prepared.serves(*given):
                    return None
                out = self.prepared(*given)
                self.replay = self.prepared.replay(q, k, v, sinks)
        except Exception:  # planned, the call fails again, and is counted and logged
            return None
        self.calls += 1
        return out, None

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        if not self.condition.by_rule:
            counts.own_pattern(self.phase, self.calls)
        elif self.calls:
            counts.sparse(self.calls)
            counts.probe.counter(self.prepared.backend)(self.calls)


@dataclass(slots=True)
class RepeatedStep:
    """A prepared decoding step, which equal layers repeat."""

    condition: RepeatCondition
    step: StepTaken
    calls: int = 0

    def run(self, current: ForwardContext, layer: int, call: AttentionCall) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the step must be planned."""
        (_, q, k, v, _, kwargs), memory = call, current.memory
        if memory is None or not self.condition.holds(current, layer, q):
            return None
        try:
            out = repeat_step(self.step, memory, layer, q, k, v, sinks_of(kwargs))
        except Exception:  # planned, the step fails again, and is counted and logged
            return None
        if out is None:
            return None
        self.calls += 1
        return out, None

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        if self.calls:
            counts.sparse(self.calls)
            counts.probe.counter("triton", "decode")(self.calls)


def keep_repeated(current: ForwardContext, passes: Passes, form: Signature, planned: CallPlan) -> None:
    """Keep a call that was prepared, unless each of its layers needs a decision of its own."""
    if planned.prepared is None or (current.deployed.guard is not None and planned.route is Route.RULE):
        return
    if form.autocast is None:
        condition = RepeatCondition.of(passes, by_rule=planned.route is not Route.OWN_PATTERN)
        _keep(current, passes, form, RepeatedCall(condition, planned.prepared, planned.phase))


def keep_step(current: ForwardContext, passes: Passes, form: Signature) -> None:
    """Keep a decoding step that was repeated, unless each of its layers needs a decision of its own."""
    assert current.memory is not None, "a decoding step has a memory"
    step, current.memory.repeated = current.memory.repeated, None
    if step is not None and current.deployed.guard is None and form.autocast is None:
        condition = RepeatCondition.of(passes, by_rule=True)
        _keep(current, passes, form, RepeatedStep(condition, step))


def keep_dense(
    current: ForwardContext, passes: Passes, form: Signature, planned: CallPlan, dense: DenseAttention
) -> None:
    """Keep a call that was planned dense."""
    assert planned.reason is not None, "a dense call has a reason"
    assert planned.plain is not None, "its mask was made"
    name, mask = planned.plain
    _keep(current, passes, form, DenseCall(dense.by_name[name], mask, (planned.reason, planned.phase)))


def _keep(current: ForwardContext, passes: Passes, form: Signature, call: Repeat) -> None:
    """Keep a call for equal layers, after counting those of a kept call that it replaces."""
    before = current.repeats.get(form)
    if before is not None:
        before.count(passes.counts)
    current.repeats[form] = call
