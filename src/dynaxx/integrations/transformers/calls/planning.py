# SPDX-License-Identifier: Apache-2.0
"""Plan one attention call, once per forward pass for all layers with equal calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from dynaxx.integrations.runtime.routing import (
    MOST_QUERIES,
    CallProperties,
    DenseReason,
    Route,
    SequenceLengths,
    is_step,
    route,
)
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, ScoreOptions, tensors_reason
from dynaxx.integrations.transformers.calls.border import Kind, beats_sdpa, causal_kind, least_queries, wins
from dynaxx.integrations.transformers.calls.decode import StepRows
from dynaxx.integrations.transformers.calls.dense_fallback import PlainMask
from dynaxx.integrations.transformers.calls.own_pattern import OwnPart, parts_of_mask, parts_of_runs, parts_of_window
from dynaxx.integrations.transformers.masks.lazy import LazyMask, has_own_pattern
from dynaxx.integrations.transformers.masks.runs import MaskRun, read_window
from dynaxx.ops.prepared.layer import Prepared
from dynaxx.policy import LayerPlan

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.forward_context import ForwardContext


T = TypeVar("T")
PerRun = Sequence[Sequence[T]]  # by batch entry and run


@dataclass(slots=True)
class CallPlan:
    """The plan of a call. Lists have one item per batch entry, or one for all entries."""

    route: Route
    phase: str  # "prefill" or "decode"
    reason: DenseReason | None = None  # why the call does not run by a rule
    runs: PerRun[MaskRun] = ()
    dense: PerRun[DenseReason | None] = ()  # why each run is dense; None if it runs by a rule
    plans: PerRun[LayerPlan] = ()  # the rule of each run
    rows: Sequence[StepRows] = ()  # the rows of a decoding step
    parts: Sequence[OwnPart] = ()  # layouts of the model's own pattern
    argument: str = ""  # the name of an unsupported argument
    prepared: Prepared | None = None  # the call of later layers, prepared by the first one
    may_prepare: bool = True  # False after a call that cannot be prepared
    plain: PlainMask | None = None  # the mask of dense calls, made by the first one

    @property
    def entries_are_equal(self) -> bool:
        """Return whether all batch entries have the same plan, so that they can run as one call."""
        return all(entry == part[0] for part in (self.runs, self.dense, self.plans) for entry in part)


def plan_call(current: ForwardContext, index: int, call: AttentionCall, scores: ScoreOptions) -> CallPlan:
    """Plan a call of layer `index`. `scores` are the options of the call, read once."""
    deployed, seqlen_q, seqlen_k = current.deployed, call.seqlen_q, call.seqlen_k
    rules, state = deployed.rules_of(index), deployed.state(index, current.blocked)
    steps = not current.steps and is_step(seqlen_q, seqlen_k)
    phase = "decode" if steps and (seqlen_q == 1 or rules.decodes) else "prefill"
    own_pattern = _own_pattern(current, call, scores)
    if not deployed.policy.rules and (current.blocked is not None or isinstance(own_pattern, DenseReason)):
        reason = current.blocked or own_pattern
        assert isinstance(reason, DenseReason), "a call without parts must have a reason"
        return CallPlan(Route.DENSE, phase, reason, argument=scores.argument)
    own_pattern = () if isinstance(own_pattern, DenseReason) else own_pattern
    properties = CallProperties(
        scores.unserved, scores.window is not None or has_own_pattern(call.mask), bool(own_pattern)
    )
    # No sequence is longer than the call. If a sequence of that length is dense, the mask need not be read.
    whole = route(rules, state, properties, SequenceLengths(seqlen_q, seqlen_k, steps))
    if whole.reason not in (None, DenseReason.LENGTH_LEFT_OUT, DenseReason.ARGUMENT, DenseReason.DROPOUT):
        if whole.reason is DenseReason.BELOW:
            deployed.remember_length(seqlen_k, decodes=steps)
        return CallPlan(whole.route, phase, whole.reason, parts=own_pattern)
    unserved = _sharded(current, index, call) or scores.unserved or tensors_reason(call)
    if unserved is not None:
        return CallPlan(Route.DENSE, phase, unserved, argument=scores.argument)
    if whole.reason is not None and whole.reason is not DenseReason.LENGTH_LEFT_OUT:
        return CallPlan(whole.route, phase, whole.reason, parts=own_pattern)
    if whole.route is Route.DECODE:
        return _plan_step(current, index, call)
    return _plan_runs(current, index, call, phase, own_pattern)


def _plan_runs(
    current: ForwardContext, index: int, call: AttentionCall, phase: str, own_pattern: Sequence[OwnPart]
) -> CallPlan:
    """Plan a call over prompts, by routing each sequence of its mask by its own lengths."""
    deployed, batch, seqlen_q, seqlen_k = current.deployed, len(call.q), call.seqlen_q, call.seqlen_k
    rules, state = deployed.rules_of(index), deployed.state(index, current.blocked)
    content = min(seqlen_q, seqlen_k)  # a static cache is longer than its content
    runs = [[MaskRun(0, seqlen_q, 0, content, True)]] * batch
    if call.mask is not None:
        found = current.runs(call.mask, batch)
        if found is None:
            return CallPlan(Route.DENSE, phase, DenseReason.MASK_KIND)
        runs = found
    properties = CallProperties(serves_own_pattern=bool(own_pattern))

    def why_dense(run: MaskRun, row: int) -> DenseReason | None:
        if current.steps and run.seqlen_q == 1:  # a decoding request among prompts, without a budget
            return DenseReason.DECODE
        unchosen = None if current.choice.row(row, batch) else DenseReason.of(current.choice.reason)
        found = route(
            rules, state, properties, SequenceLengths(run.seqlen_q, run.seqlen_k, False, run.causal, unchosen)
        )
        if run.causal:
            deployed.remember_length(run.seqlen_k)
        return found.reason

    dense = [[why_dense(run, row) for run in entry] for row, entry in enumerate(runs)]
    reasons = {reason for entry in dense for reason in entry}
    if None not in reasons:
        reason = _first(reasons - {DenseReason.PADDING})
        runs_own_pattern = bool(own_pattern) and all(
            each is None or each.keeps_own_pattern for each in (*reasons, state.blocked)
        )
        return CallPlan(Route.OWN_PATTERN if runs_own_pattern else Route.DENSE, phase, reason, parts=own_pattern)
    plan = deployed.plans[index]
    if not plan.needs_tokens:
        return CallPlan(Route.RULE, phase, None, runs, dense, [[plan] * len(entry) for entry in runs])
    if missing := current.tokens.missing(batch, seqlen_k, runs):
        return CallPlan(Route.DENSE, phase, DenseReason.of(missing))
    plans = [
        [plan if reason else current.tokens.resolve(plan, b, run) for run, reason in zip(*entry, strict=True)]
        for b, entry in enumerate(zip(runs, dense, strict=True))
    ]
    return CallPlan(Route.RULE, phase, None, runs, dense, plans)


def is_dense_pass(current: ForwardContext, device: torch.device, seqlen_q: int, past: int) -> bool:
    """Return whether every call of a pass is certain to be dense, whatever its mask.

    Args:
        current: the context of the forward pass.
        device: the device of its tokens.
        seqlen_q: number of new tokens of each row, padding included.
        past: number of cached tokens of each row.
    """
    deployed = current.deployed
    if 1 < seqlen_q < MOST_QUERIES or deployed.window is not None or current.steps:
        return False
    if deployed.own_pattern and beats_sdpa(device.type, seqlen_q):
        return False
    key, seqlen_k = (current.blocked, deployed.was_long, deployed.decode_was_long, seqlen_q == 1), past + seqlen_q
    most_q, most_k = deployed.dense_up_to.get(key, (0, 0))
    if seqlen_q <= most_q and seqlen_k <= most_k:
        return True
    for length in (1 << seqlen_k.bit_length(), seqlen_k):  # the longer one holds for the next steps of a cache too
        if _is_dense_up_to(current, seqlen_q, length):
            deployed.dense_up_to[key] = seqlen_q, length
            return True
    return False


def _is_dense_up_to(current: ForwardContext, seqlen_q: int, seqlen_k: int) -> bool:
    deployed, longest = current.deployed, SequenceLengths(seqlen_q, seqlen_k, seqlen_q == 1)
    found = (
        route(deployed.rules[layer], deployed.state(layer, current.blocked), CallProperties(), longest).reason
        for layer in deployed.one_of_each
    )
    return all(reason not in (None, DenseReason.LENGTH_LEFT_OUT) for reason in found)  # shorter ones may be in


def _plan_step(current: ForwardContext, index: int, call: AttentionCall) -> CallPlan:
    """Plan a decoding step. Its rows run together, and the longest row is routed."""
    deployed, batch, seqlen_q, seqlen_k = current.deployed, len(call.q), call.seqlen_q, call.seqlen_k
    runs = [[MaskRun(0, seqlen_q, 0, seqlen_k, True)]] * batch
    if call.mask is not None:
        found = current.runs(call.mask, batch)
        if found is None or any(not _is_one_step(entry) for entry in found):
            return CallPlan(Route.DENSE, "decode", DenseReason.MASK_KIND)
        runs = found
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


def _own_pattern(current: ForwardContext, call: AttentionCall, scores: ScoreOptions) -> Sequence[OwnPart] | DenseReason:
    """Return the layouts of the model's own pattern, or why the model's original attention must compute it."""
    seqlen_q, device, mask = call.seqlen_q, call.q.device, call.mask
    least, asked = least_queries(device.type), _asked_window(current, call)
    if not current.deployed.own_pattern:
        return DenseReason.NO_RULE
    too_short = least is None or seqlen_q < least or not (scores.need_eager or beats_sdpa(device.type, seqlen_q))
    if asked is None and too_short:
        return DenseReason.SHORT
    unserved = scores.unserved or tensors_reason(call)
    if unserved not in (None, DenseReason.NOT_CAUSAL):
        return unserved
    key = ("own_pattern", None if mask is None else id(mask), seqlen_q, call.seqlen_k, scores.need_eager, scores.window)
    return current.own_parts(key, mask, lambda: _make_parts(current, call, scores, unserved is None))


def _make_parts(
    current: ForwardContext, call: AttentionCall, scores: ScoreOptions, causal: bool
) -> Sequence[OwnPart] | DenseReason:
    batch, seqlen_q, seqlen_k, device, mask = len(call.q), call.seqlen_q, call.seqlen_k, call.q.device, call.mask
    asked = _asked_window(current, call)
    if asked is not None:
        if isinstance(mask, LazyMask):
            return parts_of_mask(mask, device, asked) or DenseReason.MASK_KIND
        return DenseReason.MASK_KIND if mask is not None else parts_of_window(asked, seqlen_q, device)
    plain = mask is not None and not (isinstance(mask, LazyMask) and not mask.plain_is_needed)
    kind: Kind = "masked" if plain else causal_kind(call.q, call.k)
    if not wins(device.type, "eager" if scores.need_eager else kind, seqlen_q):
        return DenseReason.SHORT
    if isinstance(mask, LazyMask):
        return parts_of_mask(mask, device) or DenseReason.MASK_KIND
    if mask is None:
        if scores.window is not None and scores.window < seqlen_k:  # the window is not in the mask
            return DenseReason.MASK_KIND
        stop = min(seqlen_q, seqlen_k) if causal else seqlen_k
        return parts_of_runs([[MaskRun(0, seqlen_q, 0, stop, causal)]] * batch, device)
    if scores.window is not None and not current.steps and mask.dtype == torch.bool:  # as in a compiled model
        windowed = read_window(mask[:, 0], scores.window)
        if windowed is not None:
            return parts_of_runs(windowed * (batch // len(windowed)), device, scores.window)
    runs = current.runs(mask, batch)
    if runs is None:
        return DenseReason.MASK_KIND
    # Continuous batching defines the sequences, and its masks hide keys outside the window.
    return parts_of_runs(runs, device, scores.window if current.steps else None)


def _asked_window(current: ForwardContext, call: AttentionCall) -> tuple[int, int] | None:
    """Return the window that the caller asked for, if it hides any key. It never changes a layer's own pattern."""
    window, seqlen = current.deployed.window, call.seqlen_q
    if window is None or seqlen != call.seqlen_k or seqlen <= min(window) + 1 or has_own_pattern(call.mask):
        return None
    return window


def _first(reasons: set[DenseReason | None]) -> DenseReason:
    """Return one reason for a call whose sequences are dense for several reasons."""
    return min((reason for reason in reasons if reason is not None), default=DenseReason.BELOW)


def _sharded(current: ForwardContext, index: int, call: AttentionCall) -> DenseReason | None:
    """Return a reason if the call has only a part of the layer's heads."""
    plan = current.deployed.plans.get(index)
    groups = getattr(call.module, "num_key_value_groups", None)
    q_heads = plan.q_heads if plan is not None else None if groups is None else call.k.shape[1] * groups
    return None if q_heads in (None, call.q.shape[1]) else DenseReason.SHARDED


def _is_one_step(entry: list[MaskRun]) -> bool:
    return len(entry) == 1 and (entry[0].causal or entry[0].seqlen_k == 0)
