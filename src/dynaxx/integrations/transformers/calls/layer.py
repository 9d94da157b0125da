# SPDX-License-Identifier: Apache-2.0
"""`Layer`: one attention module under a handle. It plans each call, runs it sparse or dense, and counts the outcome."""

from __future__ import annotations

import itertools
import logging
from functools import cache

from torch import Tensor

from dynaxx.derivatives import have_tangents
from dynaxx.integrations.runtime.routing import DenseReason, Route
from dynaxx.integrations.transformers.calls.arguments import AttentionCall, sinks_of
from dynaxx.integrations.transformers.calls.call_plan import CallPlan
from dynaxx.integrations.transformers.calls.decode import LayerSteps
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.planning import plan_call
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.calls.sparse import (
    Drawn,
    SparseCall,
    restore_prepared,
    run_sparse,
    sample_disabled,
)
from dynaxx.integrations.transformers.forward_context import ForwardContext
from dynaxx.integrations.transformers.passes import Passes
from dynaxx.integrations.transformers.repeats import keep_repeat
from dynaxx.policy.guard import Level

logger = logging.getLogger("dynaxx")


class Layer:
    """One attention module under a handle."""

    __slots__ = ("__weakref__", "dense", "index", "number", "passes")

    def __init__(self, passes: Passes, index: int, dense: DenseAttention) -> None:
        self.passes = passes
        self.index = index
        self.dense = dense
        self.number = next(_numbers)  # compiled code finds the layer by this number

    def current_pass(self, *, backward: bool = False) -> ForwardContext | None:
        """Return the current pass of a compiled model, None if none can be prepared; `attend` then reports why."""
        try:
            return self.passes.unseen(self.index, backward=backward)
        except Exception:
            return None

    def attend(self, current: ForwardContext | None, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Repeat an equal call, or plan and run this one and keep it: (B, Lq, Hq, D), as in `AttentionInterface`."""
        try:
            if current is None and self.passes.is_outside():
                self.passes.counts.dense(DenseReason.OUTSIDE, "prefill")
                return self.dense(call.module, call.q, call.k, call.v, call.mask, **call.kwargs)
            current = current or self.passes.unseen(self.index)
            form = self._signature(current, call)
            planned = self._plan(current, form, call.mask)
        except Exception as error:  # an error in routing must not fail the request
            self.passes.counts.not_decided(self.index, error)
            return self.dense(call.module, call.q, call.k, call.v, call.mask, **call.kwargs)
        if planned.route is Route.DENSE:
            planned.calls += 1
            if not current.counts_at_end:
                planned.count(self.passes.counts)
            return self._attend_dense(planned, form, call)
        out = None if planned.repeat is None else planned.repeat(current, self.index, call)
        if out is not None:
            planned.calls += 1
            return out, None
        out = self._run_guarded(current, planned, form, call)
        if out is None:
            return self._attend_dense(planned, form, call)
        if current.counts_at_end:
            keep_repeat(current, self.passes, form, planned)
        return out, None

    def _signature(self, current: ForwardContext, call: AttentionCall) -> Signature:
        form = Signature.of(current.deployed.kind(self.index), self.dense, call)
        unserved = DenseReason.WEIGHTS if current.wants_weights and self.dense.returns_weights else None
        unserved = DenseReason.TANGENTS if have_tangents(call.q, call.k, call.v) else unserved
        return form if unserved is None else form._replace(scores=form.scores._replace(unserved=unserved))

    def _plan(self, current: ForwardContext, form: Signature, mask: Tensor | None) -> CallPlan:
        """Return the plan of the call, which all layers with equal calls share during a pass."""
        planned = current.call_plans.get(form)
        if planned is None:
            planned = current.call_plans[form] = plan_call(current, self.index, form, mask)
            if planned.argument:
                warn_once(f"attention calls with the unsupported argument {planned.argument!r} run dense")
        return planned

    def _attend_dense(self, planned: CallPlan, form: Signature, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Run the model's original attention."""
        if planned.plain is None:
            planned.plain = self.dense.plain(call, causal=form.causal, need_eager=form.scores.need_eager)
        attend, mask = self.dense.by_name[planned.plain.name], planned.plain.mask
        found: tuple[Tensor, Tensor | None] = attend(call.module, call.q, call.k, call.v, mask, **call.kwargs)
        return found

    def _run_guarded(
        self, current: ForwardContext, planned: CallPlan, form: Signature, call: AttentionCall
    ) -> Tensor | None:
        """Run on dynaxx's kernels, (B, Lq, Hq, D). None if the guard or a failure makes the call dense."""
        counts, deployed = self.passes.counts, current.deployed
        guard = deployed.guard if self.index in deployed.plans else None
        sinks = sinks_of(call.kwargs) if form.scores.has_sinks else None
        sparse = SparseCall(self.passes, self.index, current, planned, form, guard, call.q, call.k, call.v, sinks)
        stopped = deployed.interruption(self.index, own_pattern=planned.route is Route.OWN_PATTERN)
        if stopped is not None:
            if stopped is DenseReason.GUARD and planned.route is Route.RULE:
                sample_disabled(sparse.autocast())
            counts.dense(stopped, planned.phase)
            return None
        breaker = deployed.breakers[self.index]
        try:
            sparse = sparse.autocast()
            out = drawn = None
            if planned.route is Route.DECODE:
                out = self._decode(sparse)
            elif planned.prepared is not None or planned.may_prepare:
                out, drawn = self._repeat(sparse)
            if out is None:
                out = run_sparse(sparse if drawn is None else sparse._replace(drawn=drawn))
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

    def _repeat(self, call: SparseCall) -> tuple[Tensor | None, Drawn | None]:
        """Run a prepared call and return (B, Lq, Hq, D). None if there is none, or if something needs the layout."""
        passes, planned, guard, current = self.passes, call.planned, call.guard, call.current
        inputs = (*call.tokens_first(), call.sinks)
        if planned.prepared is None:
            restore_prepared(call)
        prepared = planned.prepared
        if prepared is None or passes.faults or passes.watchers or not prepared.serves(*inputs):
            return None, None
        if planned.route is Route.OWN_PATTERN:
            return prepared(*inputs), None
        if guard is not None and guard.level(self.index) != Level.OK:
            return None, None
        probe = passes.counts.probe
        measured, current.measures_next = current.measures_next or probe.wants(call.q.device), False
        drawn = Drawn(guard is not None and guard.wants_call(), measured)
        if drawn.sampled or drawn.measured:
            return None, drawn
        out = prepared(*inputs)
        probe.counter(prepared.backend)()
        return out, None

    def _decode(self, call: SparseCall) -> Tensor:
        """Run a decoding step, (B, Lq, Hq, D)."""
        passes, current, q = self.passes, call.current, call.q
        assert current.memory is not None, "a planned decoding step must have a memory"
        for fault in passes.faults:
            fault(self.index)
        measured, current.measures_next = current.measures_next, False
        meter = passes.counts.decoding(self.index, q, measured=measured)
        steps = LayerSteps(
            layer=self.index,
            kind=current.deployed.kind(self.index),
            plan=current.deployed.decode[self.index],
            memory=current.memory,
            prepared=current.deployed.steps,
            scale=call.form.scores.scale,
            softcap=call.form.scores.softcap,
            sinks=call.sinks,
        )
        out = steps.attend(q, call.k, call.v, call.planned.rows)
        passes.counts.decoded(meter, q)
        if call.guard is not None and call.guard.wants_call():
            call.guard.left_out("decode")
        return out


_numbers = itertools.count(1)


@cache
def warn_once(message: str) -> None:
    """Log a warning, the first time only."""
    logger.warning(message)
