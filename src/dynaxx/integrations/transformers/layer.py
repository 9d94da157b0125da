# SPDX-License-Identifier: Apache-2.0
"""One attention call of one layer: route it, and run it dense, or each of its sequences with a layout."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.runtime.routing import DenseReason, Route
from dynaxx.integrations.transformers.arguments import ScoreOptions, sinks_of
from dynaxx.integrations.transformers.compiled import attend_compiled, remember
from dynaxx.integrations.transformers.decode import StepsOfKind, decode_step
from dynaxx.integrations.transformers.decoder import DENSE
from dynaxx.integrations.transformers.dense_fallback import DenseAttention, dense_piece
from dynaxx.integrations.transformers.forward_context import ARGUMENT, ForwardContext
from dynaxx.integrations.transformers.masks import MaskRun
from dynaxx.integrations.transformers.own_pattern import OwnPart
from dynaxx.integrations.transformers.planning import CallPlan, plan_call
from dynaxx.integrations.transformers.repeats.dense import dense_call, keep_dense, keep_dense_alike, running
from dynaxx.integrations.transformers.repeats.keys import key_of
from dynaxx.integrations.transformers.repeats.prepared import keep_repeated, keep_step, prepare, restore_prepared
from dynaxx.ops import sparse_attention
from dynaxx.ops.autocast import follow_autocast
from dynaxx.policy import LayerPlan
from dynaxx.policy.guard import Level

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.handle import Handle

logger = logging.getLogger("dynaxx")


class Drawn(NamedTuple):
    """The random draws of a call, made before it runs."""

    sampled: bool  # whether the guard samples it
    measured: bool  # whether telemetry measures it


class AttentionCall(NamedTuple):
    """The tensors and the context of a call: q (B, Hq, Lq, D), k and v (B, Hk, Lk, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    guard: LiveGuard | None
    current: ForwardContext
    place: tuple[int, MaskRun | None] = (0, None)  # batch entry and run of a part
    drawn: Drawn | None = None  # None: each part draws

    def entry(self, b: int) -> AttentionCall:
        """Return the call of one batch entry."""
        part = self._replace(q=self.q[b : b + 1], k=self.k[b : b + 1], v=self.v[b : b + 1])
        return part._replace(place=(b, None))

    def part(self, run: MaskRun) -> AttentionCall:
        """Return the call of one run."""
        if run[:4] == (0, self.q.shape[2], 0, self.k.shape[2]):  # the run is the whole call
            return self._replace(place=(self.place[0], run))
        rows, keys = slice(run.q_start, run.q_stop), slice(run.k_start, run.k_stop)
        part = self._replace(q=self.q[:, :, rows], k=self.k[:, :, keys], v=self.v[:, :, keys])
        return part._replace(place=(self.place[0], run))


class Layer:
    """One attention module under a handle."""

    __slots__ = ("__weakref__", "dense", "handle", "index", "number")

    def __init__(self, handle: Handle, index: int, module: nn.Module, dense: DenseAttention) -> None:
        self.handle = handle
        self.index = index
        self.dense = dense
        self.number = next(_numbers)  # compiled code finds the layer by this number
        remember(self, module)

    def attend(
        self,
        current: ForwardContext | None,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: q (B, Hq, Lq, D), k and v (B, Hk, Lk, D) -> (B, Lq, Hq, D), as in `AttentionInterface`."""
        try:
            current = current or self.handle.unseen_pass(self.index)
            scores = ScoreOptions.of(kwargs)
            planned = self._plan(current, module, q, k, mask, scores, kwargs.get("is_causal"))
        except Exception as error:  # an error in routing must not fail the request
            self.handle.counts.not_decided(self.index, error)
            return self.dense(module, q, k, v, mask, **kwargs)
        if planned.route is not Route.DENSE:
            sinks = sinks_of(kwargs) if scores.has_sinks else None
            out = self._run_guarded(current, planned, scores, q, k, v, sinks)
            if out is not None:
                if current.dense_calls is None:  # the pass has no end, which counts its calls
                    pass
                elif planned.route is Route.DECODE:
                    keep_step(current, self, module, q, mask, kwargs)
                else:
                    keep_repeated(current, self, module, q, mask, kwargs, planned)
                return out, None
        else:
            assert planned.reason is not None, "a dense call must have a reason"
            self._count_dense(current, planned, planned.reason)
        plain = planned.plain
        if plain is None or plain.dtype is not q.dtype:
            plain = planned.plain = self.dense.plain(mask, q.dtype, need_eager=scores.need_eager)
        if planned.route is Route.DENSE and not scores.need_eager and current.dense_calls is not None:
            keep = keep_dense if current.is_dense else keep_dense_alike
            keep(current, self, module, q, k, mask, kwargs, planned)
        found: tuple[Tensor, Tensor | None] = self.dense.by_name[plain.name](module, q, k, v, plain.mask, **kwargs)
        return found

    def _plan(
        self,
        current: ForwardContext,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        scores: ScoreOptions,
        is_causal: bool | None,
    ) -> CallPlan:
        """Return the plan of the call, which all layers with equal calls share during a pass."""
        kind, version = current.deployed.kind(self.index), None
        if mask is not None:
            version = (id(mask), 0 if mask.is_inference() else mask._version)
        key = (kind, q.shape, k.shape, version, scores, is_causal)
        known, of_mask = current.call_plans.get(key, (None, None))
        if known is not None and (of_mask is None or of_mask() is mask):  # ids of objects are reused
            return known
        planned = plan_call(current, self.index, module, q, k, mask, scores, is_causal)
        current.call_plans[key] = planned, None if mask is None else weakref.ref(mask)
        if planned.argument:
            _warn_once(f"attention calls with the unsupported argument {planned.argument!r} run dense")
        return planned

    def _count_dense(self, current: ForwardContext, planned: CallPlan, reason: DenseReason) -> None:
        if current.dense_calls is None:  # no hook reports the end of the pass
            self.handle.counts.dense(reason, planned.phase)
        else:
            current.dense_calls[reason, planned.phase] += 1

    def _run_guarded(
        self,
        current: ForwardContext,
        planned: CallPlan,
        scores: ScoreOptions,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Run by a rule, and return (B, Lq, Hq, D), or None if the guard or a failure makes the call dense."""
        counts, deployed = self.handle.counts, current.deployed
        guard = deployed.guard if self.index in deployed.plans else None
        stopped = deployed.interruption(self.index, own_pattern=planned.route is Route.OWN_PATTERN)
        if stopped is not None:
            if stopped is DenseReason.GUARD and planned.route is Route.RULE:
                q, k, v = follow_autocast(q, k, v)
                call = AttentionCall(q, k, v, scores.scale, scores.softcap, sinks, guard, current)
                self._sample_unseen(call, planned)
            counts.dense(stopped, planned.phase)
            return None
        breaker = deployed.breakers[self.index]
        try:
            q, k, v = follow_autocast(q, k, v)
            out = drawn = None
            if planned.route is Route.DECODE:
                out = self._decode(current, planned, scores, guard, q, k, v, sinks)
            elif planned.prepared is not None or planned.may_prepare:
                out, drawn = self._repeat(current, planned, scores, guard, q, k, v, sinks)
            if out is None:
                call = AttentionCall(q, k, v, scores.scale, scores.softcap, sinks, guard, current, drawn=drawn)
                out = self._run(call, planned, scores)
        except Exception as error:  # a failing kernel must not fail the request
            breaker.failed()
            counts.failed(self.index, error, planned.phase)
            return None
        breaker.worked()
        if planned.route is Route.OWN_PATTERN:
            counts.own_pattern(planned.phase)
            return out
        counts.sparse()
        current.ran_sparse = True
        return out

    def _repeat(
        self,
        current: ForwardContext,
        planned: CallPlan,
        scores: ScoreOptions,
        guard: LiveGuard | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor | None, Drawn | None]:
        """Run a prepared call and return (B, Lq, Hq, D). None if there is none, or if something needs the layout."""
        handle, q, k, v = self.handle, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if planned.prepared is None:
            restore_prepared(current, self.index, planned, scores, q, k, v)
        prepared = planned.prepared
        if prepared is None or handle.faults or handle.watchers or not prepared.serves(q, k, v, sinks):
            return None, None
        if planned.route is Route.OWN_PATTERN:
            return prepared(q, k, v, sinks), None
        if guard is not None and guard.level(self.index) != Level.OK:
            return None, None
        probe = handle.counts.probe
        measured, current.measures_next = current.measures_next or probe.wants(q.device), False
        drawn = Drawn(guard is not None and guard.wants_call(), measured)
        if drawn.sampled or drawn.measured:
            return None, drawn
        out = prepared(q, k, v, sinks)
        probe.counter(prepared.backend)()
        return out, None

    def _decode(
        self,
        current: ForwardContext,
        planned: CallPlan,
        scores: ScoreOptions,
        guard: LiveGuard | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Run a decoding step, (B, Lq, Hq, D)."""
        handle, deployed, memory = self.handle, current.deployed, current.memory
        assert memory is not None, "a planned decoding step must have a memory"
        for fault in handle.faults:
            fault(self.index)
        measured, current.measures_next = current.measures_next, False
        step = handle.counts.decoding(self.index, q, measured=measured)
        out = decode_step(
            q,
            k,
            v,
            planned.rows,
            deployed.decode[self.index],
            self.index,
            memory,
            StepsOfKind(deployed.steps, deployed.kind(self.index)),
            scores.scale,
            softcap=scores.softcap,
            sinks=sinks,
        )
        handle.counts.decoded(step, q)
        if guard is not None and guard.wants_call():
            guard.left_out("decode")
        return out

    def _run(self, call: AttentionCall, planned: CallPlan, scores: ScoreOptions) -> Tensor:
        """Return (B, Lq, Hq, D), with one layout per sequence."""
        for fault in self.handle.faults:
            fault(self.index)
        if planned.route is Route.OWN_PATTERN:
            return self._run_own_pattern(call, planned, scores)
        if planned.alike:
            return self._run_entry(call, planned, scores, 0)
        return torch.cat([self._run_entry(call.entry(b), planned, scores, b) for b in range(len(planned.runs))])

    def _run_own_pattern(self, call: AttentionCall, planned: CallPlan, scores: ScoreOptions) -> Tensor:
        """Run the model's own pattern, (B, Lq, Hq, D)."""
        q, k, v = call.q.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2)
        layout = planned.parts[0].layout
        if len(planned.parts) > 1 or layout is None or not planned.parts[0].covers(q, k):
            return _run_parts(call, planned.parts)
        out = sparse_attention(q, k, v, layout, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
        if planned.may_prepare:
            prepare(call.current, self.index, planned, scores, layout, q, k, v)
        return out

    def _run_entry(self, call: AttentionCall, planned: CallPlan, scores: ScoreOptions, b: int) -> Tensor:
        pieces = []
        for run, reason, plan in zip(planned.runs[b], planned.dense[b], planned.plans[b], strict=True):
            part = call.part(run)
            if reason:
                pieces.append(
                    dense_piece(part.q, part.k, part.v, run, scale=part.scale, softcap=part.softcap, sinks=part.sinks)
                )
                self.handle.counts.dense_sequences(reason, call.q.shape[0])
            else:
                pieces.append(self._sparse_piece(part, plan, planned, scores))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _sparse_piece(self, part: AttentionCall, plan: LayerPlan, planned: CallPlan, scores: ScoreOptions) -> Tensor:
        """Return the result of one sequence, (B, n, Hq, D)."""
        q, k, v = (x.transpose(1, 2) for x in (part.q, part.k, part.v))
        runs = plan if part.guard is None else part.guard.plan(self.index, plan)  # the guard may have widened it
        drawn, meter = part.drawn, self.handle.counts.probe
        probe = meter.measured(self.index, q) if drawn and drawn.measured else meter.start(self.index, q)
        read = part.current.layout(self.index, part.place, runs)  # the blocks that another layer chose
        layout = read or runs.layout(q, k, scale=part.scale)
        part.current.keep(self.index, part.place, runs, layout)
        probe.selected(layout)
        out = sparse_attention(q, k, v, layout, scale=part.scale, softcap=part.softcap, sinks=part.sinks)
        probe.done(k, v)
        for watcher in self.handle.watchers:
            watcher(self.index, layout)
        if planned.may_prepare and runs is plan:
            prepare(part.current, self.index, planned, scores, layout, q, k, v, plan)
        if part.guard is not None and (drawn.sampled if drawn else part.guard.wants_call()):
            part.guard.take(self.index, q[:1], k[:1], v[:1], part.scale, plan, runs, out[:1], read)
        return out

    def _sample_unseen(self, call: AttentionCall, planned: CallPlan) -> None:
        """Sample the rule that the guard has disabled, so that the guard can detect a recovery."""
        assert call.guard is not None, "only a guard disables a rule"
        if not call.guard.wants_call():
            return
        b, i = next((b, i) for b, entry in enumerate(planned.dense) for i, reason in enumerate(entry) if not reason)
        part = call.entry(b).part(planned.runs[b][i])
        q, k, v = (x.transpose(1, 2) for x in (part.q, part.k, part.v))
        call.guard.take(self.index, q, k, v, part.scale, planned.plans[b][i], None, None)


def _run_parts(call: AttentionCall, parts: Sequence[OwnPart]) -> Tensor:
    """Run the model's own pattern part by part, (B, Lq, Hq, D)."""
    q, k, v = call.q.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2)
    outs: list[list[Tensor]] = []
    entry: int | None = -1
    for part in parts:
        rows = slice(None) if part.entry is None else slice(part.entry, part.entry + 1)
        queries = q[rows, part.queries]
        if part.layout is None:
            out = queries.new_zeros(*queries.shape[:3], v.shape[-1])
        else:
            keys, values = k[rows, part.keys], v[rows, part.keys]
            out = sparse_attention(
                queries, keys, values, part.layout, scale=call.scale, softcap=call.softcap, sinks=call.sinks
            )
        if part.entry != entry:
            outs.append([])
            entry = part.entry
        outs[-1].append(out)
    rows_of = [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1) for pieces in outs]
    return rows_of[0] if len(rows_of) == 1 else torch.cat(rows_of)


LAYERS: weakref.WeakKeyDictionary[nn.Module, Layer] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
_warned: set[str] = set()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend for every layer of every model with a handle; the function registered with `AttentionInterface`."""
    if torch.compiler.is_compiling():
        traced = LAYERS.get(module)
        out = None if traced is None else attend_compiled(traced, module, query, key, value, attention_mask, kwargs)
        if out is not None:
            return out, None
        return _original(module)(module, query, key, value, attention_mask, **kwargs)
    current: ForwardContext | None = None
    dense = running.dense
    if dense is None or dense.config is not module.config:
        current = kwargs.pop(ARGUMENT, None)
        dense = None if current is None else current.dense_pass
    if dense is not None:
        dense.calls += 1
        mask = None if attention_mask is None else dense.plain(attention_mask)
        attended: tuple[Tensor, Tensor | None] = dense.attention(module, query, key, value, mask, **kwargs)
        return attended
    known = None
    if current is not None and current.repeats:
        known = current.repeats.get(key_of(current, module, attention_mask, kwargs))
        found = None if known is None else known.run(current, module, query, key, value, kwargs)
        if found is not None:
            return found
    layer = LAYERS.get(module)
    if layer is None:  # a copy of a model with a policy, or one that shares its config
        _warn_once(f"{type(module).__name__} asks for dynaxx attention but has no handle, so it runs dense")
        return _original(module)(module, query, key, value, attention_mask, **kwargs)
    if current is not None and current.is_dense and known is None:
        call = dense_call(current, layer, module, query, key, attention_mask, kwargs)
        found = None if call is None else call.run(current, module, query, key, value, kwargs)
        if found is not None:
            return found
    return layer.attend(current, module, query, key, value, attention_mask, kwargs)


def _original(module: nn.Module) -> DenseAttention:
    """Return the original attention of a module, with or without a handle."""
    layer = LAYERS.get(module)
    return DenseAttention(module, DENSE) if layer is None else layer.dense


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
