# SPDX-License-Identifier: Apache-2.0
"""Calls that equal an earlier one, of the same pass or of an earlier one.

    first call of a kind --> planned, prepared, and kept --> later layers of the pass: one lookup, then the call itself

Within a pass, calls are found by kind of layer, mask and window. A `DenseCall` is the model's original attention in a
pass that is certain to be dense. A `RepeatedCall` repeats a prepared call. Anything unusual about a call returns None,
and the call is planned.

A prepared call is also kept for later passes of the same shapes: with the policy in force if it follows a rule, with
the layout if it runs the model's own pattern.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.routing import DenseReason, Route
from dynaxx.integrations.transformers.arguments import HARMLESS, SINKS, ScoreOptions
from dynaxx.integrations.transformers.decode import StepTaken, repeat_step
from dynaxx.integrations.transformers.lazy_mask import has_own_pattern, plain_mask
from dynaxx.layout import BlockLayout
from dynaxx.ops.prepared.layer import LayerReplay, Prepared, prepare_layout, prepare_rule, prepared_layout
from dynaxx.patterns import Pattern
from dynaxx.policy import LayerPlan
from dynaxx.policy.rollout import ALL

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.dense_fallback import PlainMask
    from dynaxx.integrations.transformers.forward_context import ForwardContext
    from dynaxx.integrations.transformers.handle import Handle
    from dynaxx.integrations.transformers.layer import Layer
    from dynaxx.integrations.transformers.planning import Work

Attended = tuple[Tensor, Tensor | None]
SCORED = frozenset({*SINKS, "softcap", "sliding_window", "dropout"})  # arguments that `Repeated` compares
MOST_OUTCOMES = 1024


class DenseForm(NamedTuple):
    """The form of a dense call."""

    name: str  # of the attention, "sdpa" or "eager"
    device: str
    seqlen_q: int
    seqlen_k: int


@dataclass(slots=True)
class DenseCall:
    """The model's original attention, in a pass that is certain to be dense."""

    attention: Callable[..., Any]
    mask: Tensor | None  # the mask of transformers, kept so that its id stays unique
    plain: Tensor | None  # the mask that the original attention expects
    dtype: torch.dtype  # dtype of the queries
    outcome: tuple[DenseReason, str]  # reason and phase
    form: DenseForm
    alike: Hashable = None  # see `_alike`; None if every call of the pass is certain to be dense
    calls: int = 0

    def run(
        self, current: ForwardContext, module: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the call must be planned."""
        if q.dtype is not self.dtype or not _sdpa_computes(kwargs):
            return None
        if self.alike is not None and self.alike != _alike(q, k, kwargs):
            return None
        self.calls += 1
        found: Attended = self.attention(module, q, k, v, self.plain, **kwargs)
        return found

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass."""
        counts.dense(*self.outcome, self.calls)


class DenseOutcome(NamedTuple):
    """The attention and the outcome of all calls of a dense pass, kept for later passes of the same kind."""

    attention: Callable[..., Any]  # the model's original attention, which reads bool masks
    outcome: tuple[DenseReason, str]


class DensePass:
    """All calls of a pass, if they equal those of an earlier pass: each goes to the model's original attention.

    Attributes:
        attention: the model's original attention.
        outcome: reason and phase of the calls.
        calls: number of calls so far.
        deployed: the policy in force when the pass started.
        tokens: number of tokens of the pass, if it has no `ForwardContext`.
        config: the config of its modules, if it has no `ForwardContext`.
    """

    __slots__ = ("_mask", "_plain", "attention", "calls", "config", "deployed", "outcome", "tokens")

    def __init__(self, known: DenseOutcome, deployed: Deployed, tokens: int = 0) -> None:
        self.attention, self.outcome = known
        self.deployed, self.tokens, self.calls = deployed, tokens, 0
        self.config: Any = None
        self._mask: Tensor | None = None  # the last mask of transformers, and what its attention expects
        self._plain: Tensor | None = None

    def plain(self, mask: Tensor) -> Tensor | None:
        """Return the mask that SDPA expects, which calls with the same mask share."""
        if mask is not self._mask:
            self._mask, self._plain = mask, plain_mask(mask, "sdpa", mask.dtype)
        return self._plain


@dataclass(slots=True)
class Repeated:
    """A call that equal layers repeat within a pass: the fields of prepared calls and of decoding steps."""

    handle: Handle
    mask: Tensor | None  # see `DenseCall`
    names: tuple[str, ...]  # of the keyword arguments
    options: tuple[Any, ...]  # see `_options`
    by_rule: bool  # False for the model's own pattern
    measures: bool  # whether telemetry may measure a call of this pass

    def may_run(self, current: ForwardContext, layer: int, q: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether a layer may repeat the call: equal options, no earlier failure, and no measurement."""
        if self.handle.faults or not current.deployed.breakers[layer].healthy:
            return False
        if tuple(kwargs) != self.names or _options(kwargs) != self.options:
            return False
        if self.measures and self.handle.counts.probe.wants(q.device):
            current.measures_next = True
            return False
        return True


def _common(
    layer: Layer, mask: Tensor | None, kwargs: Any, *, by_rule: bool
) -> tuple[Handle, Tensor | None, tuple[str, ...], tuple[Any, ...], bool, bool]:
    """Return the fields of a `Repeated`."""
    measures = by_rule and layer.handle.counts.probe.may_want()
    return layer.handle, mask, tuple(kwargs), _options(kwargs), by_rule, measures


@dataclass(slots=True)
class RepeatedCall(Repeated):
    """A prepared call, which equal layers repeat."""

    prepared: Prepared
    phase: str
    replay: LayerReplay | None = None  # the call of the layer before, if it can be repeated from addresses
    calls: int = 0

    def run(
        self, current: ForwardContext, module: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the call must be planned."""
        if self.handle.watchers or not self.may_run(current, module.layer_idx, q, kwargs):
            return None
        sinks = _sinks(kwargs)
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
        if not self.by_rule:
            counts.own_pattern(self.phase, self.calls)
        elif self.calls:
            counts.sparse(self.calls)
            counts.probe.counter(self.prepared.backend)(self.calls)


@dataclass(slots=True)
class RepeatedStep(Repeated):
    """A prepared decoding step, which equal layers repeat."""

    step: StepTaken
    deployed: Deployed
    calls: int = 0

    def run(
        self, current: ForwardContext, module: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Attended | None:
        """Attend as in `AttentionInterface`; None if the step must be planned."""
        layer, memory = module.layer_idx, current.memory
        if memory is None or not self.may_run(current, layer, q, kwargs):
            return None
        try:
            out = repeat_step(self.step, memory, layer, q, k, v, _sinks(kwargs))
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
            self.deployed.steps_repeat = True


def dense_pass(current: ForwardContext, device: str, seqlen_q: int, past: int) -> DensePass | None:
    """Return the calls of a pass, if an earlier one of its kind was certain to be dense, and its calls were alike.

    Args:
        current: the context of the pass.
        device: the type of its device.
        seqlen_q: number of new tokens of each row.
        past: number of cached tokens of each row; only whole prompts are known.
    """
    known = current.deployed.dense_passes.get(_pass_key(current, device, seqlen_q)) if past == 0 else None
    return None if known is None else DensePass(known, current.deployed)


class DensePasses:
    """Dense passes over whole prompts without a cache, by the shape of their token ids, for passes of the same shape.

    Such a pass needs no `ForwardContext`: its policy, its requests and its calls are known.
    """

    def __init__(self) -> None:
        self._known: dict[torch.Size, tuple[DenseOutcome, tuple[Any, ...]]] = {}

    def keep(self, current: ForwardContext, done: DensePass, ids: Tensor | None, cache: Any) -> None:
        """Keep a pass that ended, if nothing but its shape, the policy and its state decided."""
        rollout = current.deployed.policy.rollout
        every = rollout.flag is None and rollout.share == 1.0
        if ids is None or ids.shape[-1] < 2 or cache is not None or current.blocked is not None:
            return
        if not every or current.choice is not ALL:
            return
        latest = next(reversed(self._known.values()), None)
        if len(self._known) >= MOST_OUTCOMES or (latest is not None and latest[1][0] is not current.deployed):
            self._known = {}  # a former policy must not be kept alive
        self._known[ids.shape] = DenseOutcome(done.attention, done.outcome), _state(current.deployed, ids)

    def again(self, kwargs: dict[str, Any], deployed: Deployed) -> DensePass | None:
        """Return the calls of a pass with these arguments, if it is like one that was kept."""
        ids: Tensor | None = kwargs.get("input_ids")
        if ids is None:
            return None
        known = self._known.get(ids.shape)
        if known is None or known[1] != _state(deployed, ids) or torch.is_grad_enabled():
            return None
        if kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None or "write_index" in kwargs:
            return None
        return DensePass(known[0], deployed, ids.numel())


class _Thread(threading.local):
    """State of a thread."""

    dense: DensePass | None = None  # the pass that runs, if it has no `ForwardContext`


running = _Thread()


def _state(deployed: Deployed, ids: Tensor) -> tuple[Any, ...]:
    return deployed, deployed.was_long, deployed.decode_was_long, ids.device


def keep_dense_pass(current: ForwardContext, layers: int) -> None:
    """Keep what all calls of a dense pass over whole prompts had in common, if there were as many as layers."""
    calls = [each for each in current.straight.values() if isinstance(each, DenseCall)]
    first = calls[0] if calls else None
    if first is None or first.form.name != "sdpa" or first.form.seqlen_q != first.form.seqlen_k:
        return
    same = (first.form, first.attention, first.outcome)
    if sum(x.calls for x in calls if (x.form, x.attention, x.outcome) == same) == layers:
        known = current.deployed.dense_passes
        if len(known) >= MOST_OUTCOMES:
            known.clear()
        known[_pass_key(current, first.form.device, first.form.seqlen_q)] = DenseOutcome(first.attention, first.outcome)


def _pass_key(current: ForwardContext, device: str, seqlen_q: int) -> Hashable:
    deployed = current.deployed
    return current.blocked, deployed.was_long, deployed.decode_was_long, device, seqlen_q


def key_of(current: ForwardContext, module: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> Hashable:
    """Return a key that is equal for calls of a pass with equal layers, masks and windows."""
    return current.deployed.kinds.get(module.layer_idx, 0), id(mask), kwargs.get("sliding_window")


def keep_dense(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: Any,
    work: Work,
) -> None:
    """Keep a call that was planned in a dense pass, and its outcome for later passes."""
    assert work.reason is not None, "a dense call has a reason"
    assert work.plain is not None, "its mask was made"
    outcome = work.reason, work.phase
    known = current.deployed.outcomes
    if len(known) >= MOST_OUTCOMES:
        known.clear()
    known[_outcome_key(current, layer.index, q, mask, kwargs)] = outcome
    _keep_dense(current, layer, module, q, k, mask, kwargs, work.plain, outcome)


def keep_dense_alike(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: Any,
    work: Work,
) -> None:
    """Keep a call that was planned dense, for layers with equal calls in a pass whose other calls may be sparse."""
    if work.reason is None or work.plain is None or not _may_repeat(q, kwargs):
        return
    outcome = work.reason, work.phase
    _keep_dense(current, layer, module, q, k, mask, kwargs, work.plain, outcome, alike=_alike(q, k, kwargs))


def dense_call(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> DenseCall | None:
    """Return the call of a dense pass, if an earlier pass had the same; None if it must be planned."""
    outcome = current.deployed.outcomes.get(_outcome_key(current, layer.index, q, mask, kwargs))
    if outcome is None or not _sdpa_computes(kwargs):
        return None
    plain = layer.dense.plain(mask, q.dtype, need_eager=False)
    return _keep_dense(current, layer, module, q, k, mask, kwargs, plain, outcome)


def _keep_dense(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    kwargs: Any,
    plain: PlainMask,
    outcome: tuple[DenseReason, str],
    alike: Hashable = None,
) -> DenseCall:
    """Return the model's original attention as a `DenseCall`, kept for equal layers of the pass."""
    form = DenseForm(plain.name, q.device.type, q.shape[2], k.shape[2])
    found = DenseCall(layer.dense.by_name[plain.name], mask, plain.mask, q.dtype, outcome, form, alike)
    _keep(current, layer, key_of(current, module, mask, kwargs), found)
    return found


def keep_repeated(
    current: ForwardContext, layer: Layer, module: nn.Module, q: Tensor, mask: Tensor | None, kwargs: Any, work: Work
) -> None:
    """Keep a call that was prepared, unless each of its layers needs a decision of its own."""
    if work.prepared is None or (current.deployed.guard is not None and work.route is Route.RULE):
        return
    if not _may_repeat(q, kwargs):
        return
    common = _common(layer, mask, kwargs, by_rule=work.route is not Route.OWN_PATTERN)
    found = RepeatedCall(*common, work.prepared, work.phase)
    _keep(current, layer, key_of(current, module, mask, kwargs), found)


def keep_step(
    current: ForwardContext,
    layer: Layer,
    module: nn.Module,
    q: Tensor,
    mask: Tensor | None,
    kwargs: Any,
) -> None:
    """Keep a decoding step that was repeated, unless each of its layers needs a decision of its own."""
    assert current.memory is not None, "a decoding step has a memory"
    step, current.memory.repeated = current.memory.repeated, None
    if step is None or current.deployed.guard is not None or not _may_repeat(q, kwargs):
        return
    common = _common(layer, mask, kwargs, by_rule=True)
    found = RepeatedStep(*common, step, current.deployed)
    _keep(current, layer, key_of(current, module, mask, kwargs), found)


def _may_repeat(q: Tensor, kwargs: Any) -> bool:
    """Return whether the options of a call are all known, so that equal ones give equal calls."""
    others = any(name not in HARMLESS and name not in SCORED for name in kwargs)
    return not (others or kwargs.get("dropout") or torch.is_autocast_enabled(q.device.type))


def _keep(current: ForwardContext, layer: Layer, key: Hashable, call: DenseCall | RepeatedCall | RepeatedStep) -> None:
    """Keep a call for equal layers, after counting those of a call that it replaces."""
    before = current.straight.get(key)
    if before is not None:
        before.count(layer.handle.counts)
    current.straight[key] = call


def _outcome_key(current: ForwardContext, index: int, q: Tensor, mask: Tensor | None, kwargs: Any) -> Hashable:
    own = has_own_pattern(mask) or kwargs.get("sliding_window") is not None
    return current.deployed.kind(index), q.shape[2], own, current.blocked


def _alike(q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> Hashable:
    """Return what must be equal in calls of a pass that have one plan, besides kind of layer, mask and window."""
    return q.shape, k.shape, tuple(kwargs), _options(kwargs)


def _options(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that change a result, besides sinks."""
    get = kwargs.get
    return get("scaling"), get("softcap"), get("is_causal"), get("dropout")


def _sinks(kwargs: dict[str, Any]) -> Tensor | None:
    found: Tensor | None = kwargs.get(SINKS[0])
    return kwargs.get(SINKS[1]) if found is None else found


def _sdpa_computes(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("softcap") is None and _sinks(kwargs) is None


MOST_CALLS = 256  # prepared calls of a policy; prompts of new lengths have new ones


def restore_prepared(
    current: ForwardContext, layer: int, work: Work, scores: ScoreOptions, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Set `work.prepared` to the call that an earlier pass prepared, if there is one.

    Args:
        current: the context of the pass.
        layer: index of the layer.
        work: the plan of the call.
        scores: its options.
        q: (batch, seqlen_q, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v).
    """
    if layer in current.deployed.sources or not _is_whole(work, q, k):
        work.may_prepare = False
    elif work.route is Route.OWN_PATTERN:
        layout = work.parts[0].layout
        assert layout is not None, "a whole part has a layout"
        work.prepared = prepared_layout(layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
    elif work.plans[0][0].is_static:  # kept with the layout, whose cache is bounded by bytes
        layout = work.plans[0][0].layout(q, k, scale=scores.scale)
        work.prepared = prepared_layout(layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
    else:
        work.prepared = current.deployed.prepared.get(_key(current, layer, scores, q, k, v))


def prepare(
    current: ForwardContext,
    layer: int,
    work: Work,
    scores: ScoreOptions,
    layout: BlockLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: LayerPlan | None = None,
) -> None:
    """Prepare a call that just ran over `layout`: by the rule of `plan`, or the model's own pattern if it is None."""
    work.may_prepare = False
    if plan is None or plan.is_static:
        work.prepared = prepare_layout(layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
        return
    if len(plan.groups) > 1 or plan is not current.deployed.plans.get(layer):
        return
    rule = plan.groups[0].rule
    assert not isinstance(rule, Pattern), "the plan is not static"
    work.prepared = prepare_rule(rule, layout, q, k, v, scale=scores.scale, softcap=scores.softcap)
    if work.prepared is not None:
        kept = current.deployed.prepared
        if len(kept) >= MOST_CALLS:
            kept.clear()
        kept[_key(current, layer, scores, q, k, v)] = work.prepared


def _is_whole(work: Work, q: Tensor, k: Tensor) -> bool:
    """Return whether a call has one plan that covers all of its queries and keys."""
    if work.route is Route.OWN_PATTERN:
        return len(work.parts) == 1 and work.parts[0].layout is not None and work.parts[0].covers(q, k)
    if work.route is not Route.RULE or not work.alike or len(work.runs[0]) > 1:
        return False
    return work.dense[0][0] is None and work.runs[0][0] == (0, q.shape[1], 0, k.shape[1], True)


def _key(current: ForwardContext, layer: int, scores: ScoreOptions, q: Tensor, k: Tensor, v: Tensor) -> Hashable:
    form = (q.shape, k.shape, v.shape, q.dtype, q.device)
    return (current.deployed.kind(layer), scores.scale, scores.softcap, *form)
