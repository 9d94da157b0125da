# SPDX-License-Identifier: Apache-2.0
"""Prepared calls and decoding steps that equal layers of a pass repeat without running the plan again.

A `CallPlan` holds the repetition. It returns None if the call must run as planned, as for measurements, after failures,
and where the tensors differ. It never changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dynaxx.integrations.runtime.routing import Route
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, sinks_of
from dynaxx.integrations.transformers.calls.call_plan import CallPlan
from dynaxx.integrations.transformers.calls.decode import StepTaken, repeat_step
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.forward_context import ForwardContext
from dynaxx.integrations.transformers.passes import Passes
from dynaxx.ops.prepared.layer import LayerReplay, Prepared


class RepeatCondition(NamedTuple):
    """When a layer of the same pass may repeat a call with an equal signature."""

    passes: Passes
    measures: bool  # whether telemetry may measure a call of this pass

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
    replay: LayerReplay | None = None  # the call of the layer before, if it can be repeated from addresses

    def __call__(self, current: ForwardContext, layer: int, call: AttentionCall) -> Tensor | None:
        """Attend, (B, Lq, Hq, D); None if the call must run as planned."""
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
        except Exception:  # as planned, the call fails again, and is counted and logged
            return None
        return out


@dataclass(slots=True)
class RepeatedStep:
    """A prepared decoding step, which equal layers repeat."""

    condition: RepeatCondition
    step: StepTaken

    def __call__(self, current: ForwardContext, layer: int, call: AttentionCall) -> Tensor | None:
        """Attend, (B, Lq, Hq, D); None if the step must run as planned."""
        (_, q, k, v, _, kwargs), memory = call, current.memory
        if memory is None or not self.condition.holds(current, layer, q):
            return None
        try:
            return repeat_step(self.step, memory, layer, q, k, v, sinks_of(kwargs))
        except Exception:  # as planned, the step fails again, and is counted and logged
            return None


def keep_repeat(current: ForwardContext, passes: Passes, form: Signature, planned: CallPlan) -> None:
    """Let equal layers repeat a call that just ran and was prepared, unless each needs a decision of its own."""
    step = None
    if planned.route is Route.DECODE:
        assert current.memory is not None, "a decoding step has a memory"
        step, current.memory.repeated = current.memory.repeated, None
    own_pattern = planned.route is Route.OWN_PATTERN
    if form.autocast is not None or (current.deployed.guard is not None and not own_pattern):
        return
    condition = RepeatCondition(passes, not own_pattern and passes.counts.probe.may_want())
    if step is not None:
        planned.repeat = RepeatedStep(condition, step)
    elif planned.prepared is not None:
        planned.repeat = RepeatedCall(condition, planned.prepared)
