# SPDX-License-Identifier: Apache-2.0
"""Prepared sparse calls and decoding steps, and their repetition by equal layers and later passes.

A `RepeatedCall` repeats a prepared call, and a `RepeatedStep` a prepared decoding step, for equal layers of one pass.
A prepared call is also kept for later passes of the same shapes: with the policy in force if it follows a rule, with
the layout if it runs the model's own pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.routing import Route
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, Signature, sinks_of
from dynaxx.integrations.transformers.calls.decode import StepTaken, repeat_step
from dynaxx.integrations.transformers.repeats.keep import Attended, keep
from dynaxx.layout import BlockLayout
from dynaxx.ops.prepared.layer import LayerReplay, Prepared, prepare_layout, prepare_rule, prepared_layout
from dynaxx.patterns import Pattern
from dynaxx.policy import LayerPlan

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.calls.layer import Layer
    from dynaxx.integrations.transformers.calls.planning import CallPlan
    from dynaxx.integrations.transformers.calls.sparse import SparseCall
    from dynaxx.integrations.transformers.forward_context import ForwardContext
    from dynaxx.integrations.transformers.handle import Handle

MOST_CALLS = 256  # prepared calls of a policy; prompts of new lengths have new ones


class RepeatCondition(NamedTuple):
    """When a layer of the same pass may repeat a call with an equal signature."""

    handle: Handle
    by_rule: bool  # False for the model's own pattern
    measures: bool  # whether telemetry may measure a call of this pass

    @classmethod
    def of(cls, layer: Layer, *, by_rule: bool) -> RepeatCondition:
        """Return the condition for calls that equal one of `layer`."""
        return cls(layer.handle, by_rule, by_rule and layer.handle.counts.probe.may_want())

    def holds(self, current: ForwardContext, layer: int, q: Tensor) -> bool:
        """Return whether a layer may repeat the call: no earlier failure, and no measurement."""
        if self.handle.faults or not current.deployed.breakers[layer].healthy:
            return False
        if self.measures and self.handle.counts.probe.wants(q.device):
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
        if self.condition.handle.watchers or not self.condition.holds(current, layer, q):
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


def keep_repeated(current: ForwardContext, layer: Layer, form: Signature, planned: CallPlan) -> None:
    """Keep a call that was prepared, unless each of its layers needs a decision of its own."""
    if planned.prepared is None or (current.deployed.guard is not None and planned.route is Route.RULE):
        return
    if form.autocast is None:
        condition = RepeatCondition.of(layer, by_rule=planned.route is not Route.OWN_PATTERN)
        keep(current, layer, form, RepeatedCall(condition, planned.prepared, planned.phase))


def keep_step(current: ForwardContext, layer: Layer, form: Signature) -> None:
    """Keep a decoding step that was repeated, unless each of its layers needs a decision of its own."""
    assert current.memory is not None, "a decoding step has a memory"
    step, current.memory.repeated = current.memory.repeated, None
    if step is not None and current.deployed.guard is None and form.autocast is None:
        condition = RepeatCondition.of(layer, by_rule=True)
        keep(current, layer, form, RepeatedStep(condition, step))


def restore_prepared(call: SparseCall) -> None:
    """Set `planned.prepared` to the call that an earlier pass prepared, if there is one."""
    planned, deployed, (q, k, v) = call.planned, call.current.deployed, call.tokens_first()
    if call.layer.index in deployed.sources or not _is_whole(planned, q, k):
        planned.may_prepare = False
        return
    scale, softcap = call.form.scores.scale, call.form.scores.softcap
    if planned.route is Route.OWN_PATTERN:
        layout = planned.parts[0].layout
        assert layout is not None, "a whole part has a layout"
        planned.prepared = prepared_layout(layout, q, k, v, scale=scale, softcap=softcap)
    elif planned.plans[0][0].is_static:  # kept with the layout, whose cache is bounded by bytes
        layout = planned.plans[0][0].layout(q, k, scale=scale)
        planned.prepared = prepared_layout(layout, q, k, v, scale=scale, softcap=softcap)
    else:
        planned.prepared = deployed.prepared.get(call.form._replace(mask=None))


def prepare(call: SparseCall, layout: BlockLayout, plan: LayerPlan | None = None) -> None:
    """Prepare a call that just ran over `layout`: by the rule of `plan`, or the model's own pattern if it is None."""
    planned, deployed, (q, k, v) = call.planned, call.current.deployed, call.tokens_first()
    scale, softcap = call.form.scores.scale, call.form.scores.softcap
    planned.may_prepare = False
    if plan is None or plan.is_static:
        planned.prepared = prepare_layout(layout, q, k, v, scale=scale, softcap=softcap)
        return
    if len(plan.groups) > 1 or plan is not deployed.plans.get(call.layer.index):
        return
    rule = plan.groups[0].rule
    assert not isinstance(rule, Pattern), "the plan is not static"
    planned.prepared = prepare_rule(rule, layout, q, k, v, scale=scale, softcap=softcap)
    if planned.prepared is not None:
        kept = deployed.prepared
        if len(kept) >= MOST_CALLS:
            kept.clear()
        kept[call.form._replace(mask=None)] = planned.prepared


def _is_whole(planned: CallPlan, q: Tensor, k: Tensor) -> bool:
    """Return whether a call has one plan that covers all of its queries and keys."""
    if planned.route is Route.OWN_PATTERN:
        return len(planned.parts) == 1 and planned.parts[0].layout is not None and planned.parts[0].covers(q, k)
    if planned.route is not Route.RULE or not planned.entries_are_equal or len(planned.runs[0]) > 1:
        return False
    if planned.plans[0][0].lead(q.shape[1], k.shape[1]):
        return False
    return planned.dense[0][0] is None and planned.runs[0][0] == (0, q.shape[1], 0, k.shape[1], True)
