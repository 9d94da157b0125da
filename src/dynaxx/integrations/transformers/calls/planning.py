# SPDX-License-Identifier: Apache-2.0
"""Plan one attention call, once per forward pass for all layers with equal calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dynaxx.integrations.runtime.routing import (
    CallProperties,
    DenseReason,
    Route,
    SequenceLengths,
    is_step,
    route,
)
from dynaxx.integrations.transformers.calls.call_plan import CallPlan, PerRun
from dynaxx.integrations.transformers.calls.decode import StepRows
from dynaxx.integrations.transformers.calls.own_pattern import OwnPart
from dynaxx.integrations.transformers.calls.own_planning import own_parts
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.forward_context import ForwardContext
from dynaxx.integrations.transformers.masks.lazy import has_own_pattern
from dynaxx.integrations.transformers.masks.runs import MaskRun


def plan_call(current: ForwardContext, index: int, form: Signature, mask: Tensor | None) -> CallPlan:
    """Plan a call of layer `index` from its signature and its mask."""
    deployed, seqlen_q, seqlen_k, scores = current.deployed, form.seqlen_q, form.seqlen_k, form.scores
    rules, state = deployed.rules_of(index), deployed.state(index, current.blocked)
    steps = not current.steps and is_step(seqlen_q, seqlen_k)
    phase = "decode" if steps and (seqlen_q == 1 or rules.decodes) else "prefill"
    found = own_parts(current, form, mask)
    own_pattern, no_own_pattern = ((), found) if isinstance(found, DenseReason) else (found, None)
    if not deployed.policy.rules and (reason := current.blocked or no_own_pattern):
        return CallPlan(Route.DENSE, phase, reason, argument=scores.argument)
    # No sequence is longer than the call. If a sequence of that length is dense, the mask need not be read.
    has_window = scores.window is not None or has_own_pattern(mask)
    properties = CallProperties(scores.unserved, has_window, bool(own_pattern))
    whole = route(rules, state, properties, SequenceLengths(seqlen_q, seqlen_k, steps))
    if whole.reason in (None, DenseReason.LENGTH_LEFT_OUT):
        mask = current.visible(mask)
        unserved = _sharded(current, index, form) or scores.unserved or form.tensors_reason(mask)
        if unserved is not None:
            return _without_rule(current, form, phase, unserved, own_pattern)
        if whole.route is Route.DECODE:
            return _plan_step(current, index, form, mask)
        return _plan_runs(current, index, form, mask, phase, own_pattern)
    if whole.reason is DenseReason.BELOW:
        deployed.remember_length(seqlen_k, decodes=steps)
    return CallPlan(whole.route, phase, whole.reason, parts=own_pattern, argument=scores.argument)


def _without_rule(
    current: ForwardContext, form: Signature, phase: str, reason: DenseReason, own_pattern: Sequence[OwnPart]
) -> CallPlan:
    """Plan a call that a rule should serve and cannot: by the model's own pattern, if dynaxx serves that."""
    chosen = all(current.choice.row(row, form.batch) for row in range(form.batch))
    way, parts = (Route.OWN_PATTERN, own_pattern) if own_pattern and chosen else (Route.DENSE, ())
    return CallPlan(way, phase, reason, parts=parts, argument=form.scores.argument)


def _plan_runs(
    current: ForwardContext,
    index: int,
    form: Signature,
    mask: Tensor | None,
    phase: str,
    own_pattern: Sequence[OwnPart],
) -> CallPlan:
    """Plan a call over prompts, by routing each sequence of its mask by its own lengths."""
    content = min(form.seqlen_q, form.seqlen_k)  # a static cache is longer than its content
    runs = _runs_of(current, form, mask, MaskRun(0, form.seqlen_q, 0, content, True))
    if runs is None:
        return _without_rule(current, form, phase, DenseReason.MASK_KIND, own_pattern)
    dense = _why_dense(current, index, runs, bool(own_pattern))
    reasons = {reason for entry in dense for reason in entry}
    if None not in reasons:
        blocked = current.deployed.state(index, current.blocked).blocked
        keeps_own_pattern = all(each is None or each.keeps_own_pattern for each in (*reasons, blocked))
        way = Route.OWN_PATTERN if own_pattern and keeps_own_pattern else Route.DENSE
        return CallPlan(way, phase, _first(reasons - {DenseReason.PADDING}), parts=own_pattern)
    plan = current.deployed.plans[index]
    if not plan.needs_tokens:
        return CallPlan(Route.RULE, phase, None, runs, dense, [[plan] * len(entry) for entry in runs])
    if missing := current.tokens.missing(len(runs), form.seqlen_k, runs):
        return _without_rule(current, form, phase, DenseReason.of(missing), own_pattern)
    plans = [
        [plan if reason else current.tokens.resolve(plan, b, run) for run, reason in zip(*entry, strict=True)]
        for b, entry in enumerate(zip(runs, dense, strict=True))
    ]
    return CallPlan(Route.RULE, phase, None, runs, dense, plans)


def _runs_of(
    current: ForwardContext, form: Signature, mask: Tensor | None, whole: MaskRun
) -> list[list[MaskRun]] | None:
    """Return the runs of each batch entry, `whole` without a mask; None if the mask has none."""
    return [[whole]] * form.batch if mask is None else current.runs(mask, form.batch)


def _why_dense(
    current: ForwardContext, index: int, runs: PerRun[MaskRun], serves_own_pattern: bool
) -> PerRun[DenseReason | None]:
    """Return why each run is dense, or None if it runs by the layer's rule."""
    deployed, batch = current.deployed, len(runs)
    rules, state = deployed.rules_of(index), deployed.state(index, current.blocked)
    properties = CallProperties(serves_own_pattern=serves_own_pattern)

    def reason_of(run: MaskRun, row: int) -> DenseReason | None:
        if current.steps and run.seqlen_q == 1:  # a decoding request among prompts, without a budget
            return DenseReason.DECODE
        unchosen = None if current.choice.row(row, batch) else DenseReason.of(current.choice.reason)
        lengths = SequenceLengths(run.seqlen_q, run.seqlen_k, False, run.causal, unchosen)
        if run.causal:
            deployed.remember_length(run.seqlen_k)
        return route(rules, state, properties, lengths).reason

    return [[reason_of(run, row) for run in entry] for row, entry in enumerate(runs)]


def _plan_step(current: ForwardContext, index: int, form: Signature, mask: Tensor | None) -> CallPlan:
    """Plan a decoding step. Its rows run together, and the longest row is routed."""
    deployed, batch, seqlen_q, seqlen_k = current.deployed, form.batch, form.seqlen_q, form.seqlen_k
    runs = _runs_of(current, form, mask, MaskRun(0, seqlen_q, 0, seqlen_k, True))
    if runs is None or not all(len(entry) == 1 and (entry[0].causal or not entry[0].seqlen_k) for entry in runs):
        return CallPlan(Route.DENSE, "decode", DenseReason.MASK_KIND)
    if current.memory is None:
        return CallPlan(Route.DENSE, "decode", DenseReason.NO_CACHE)
    chosen = all(current.choice.row(row, batch) for row in range(batch))
    unchosen = None if chosen else DenseReason.of(current.choice.reason)
    longest = max(entry[0].seqlen_k for entry in runs)
    rules, state = deployed.rules_of(index), deployed.state(index, current.blocked)
    found_route = route(rules, state, CallProperties(), SequenceLengths(seqlen_q, longest, True, unchosen=unchosen))
    deployed.remember_length(longest, decodes=True)
    if found_route.reason is not None:
        return CallPlan(Route.DENSE, "decode", found_route.reason)
    return CallPlan(Route.DECODE, "decode", rows=StepRows.of([run for (run,) in runs]))


def _first(reasons: set[DenseReason | None]) -> DenseReason:
    """Return one reason for a call whose sequences are dense for several reasons."""
    return min((reason for reason in reasons if reason is not None), default=DenseReason.BELOW)


def _sharded(current: ForwardContext, index: int, form: Signature) -> DenseReason | None:
    """Return a reason if the call has only a part of the layer's heads."""
    plan = current.deployed.plans.get(index)
    q_heads = plan.q_heads if plan is not None else None if form.group_size is None else form.k[1] * form.group_size
    return None if q_heads in (None, form.q[1]) else DenseReason.SHARDED
