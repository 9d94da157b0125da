# SPDX-License-Identifier: Apache-2.0
"""Run a call on dynaxx's kernels: by a rule, with one layout per sequence, or with the model's own pattern."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.runtime.routing import Route
from dynaxx.integrations.transformers.calls.call_plan import CallPlan
from dynaxx.integrations.transformers.calls.dense_fallback import dense_piece
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.forward_context import ForwardContext
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.integrations.transformers.passes import Passes
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.ops.checks import follow_autocast
from dynaxx.ops.prepared.layer import prepare_layout, prepare_rule, prepared_layout
from dynaxx.patterns import Pattern
from dynaxx.policy import LayerPlan

MAX_CALLS = 256  # prepared calls of a policy; prompts of new lengths have new ones


class Drawn(NamedTuple):
    """The random draws of a call, made before it runs."""

    sampled: bool  # whether the guard samples it
    measured: bool  # whether telemetry measures it


class AttentionOptions(TypedDict):
    """Keyword arguments of `sparse_attention`."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class SparseCall(NamedTuple):
    """A planned call that runs on dynaxx's kernels, or one sequence of it."""

    passes: Passes
    layer: int  # its index
    current: ForwardContext
    planned: CallPlan
    form: Signature
    guard: LiveGuard | None
    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hk, Lk, D)
    v: Tensor  # (B, Hk, Lk, E)
    sinks: Tensor | None  # (Hq,)
    batch_entry: int = 0
    drawn: Drawn | None = None  # None: each sequence draws

    @property
    def options(self) -> AttentionOptions:
        """Return the keyword arguments of `sparse_attention`."""
        return {"scale": self.form.scores.scale, "softcap": self.form.scores.softcap, "sinks": self.sinks}

    def tokens_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as dynaxx's own functions read them, (B, L, H, D)."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    def autocast(self) -> SparseCall:
        """Return the call with q, k and v in the dtype of autocast, if it is on."""
        q, k, v = follow_autocast(self.q, self.k, self.v)
        return self._replace(q=q, k=k, v=v)

    def entry(self, b: int) -> SparseCall:
        """Return the call of one batch entry."""
        return self._replace(q=self.q[b : b + 1], k=self.k[b : b + 1], v=self.v[b : b + 1], batch_entry=b)

    def part(self, run: MaskRun) -> SparseCall:
        """Return the call of one run."""
        if run[:4] == (0, self.q.shape[2], 0, self.k.shape[2]):  # the run is the whole call
            return self
        rows, keys = slice(run.q_start, run.q_stop), slice(run.k_start, run.k_stop)
        return self._replace(q=self.q[:, :, rows], k=self.k[:, :, keys], v=self.v[:, :, keys])


def run_sparse(call: SparseCall) -> Tensor:
    """Run a call by a rule or by the model's own pattern, (B, Lq, Hq, D)."""
    planned = call.planned
    for fault in call.passes.faults:
        fault(call.layer)
    if planned.route is Route.OWN_PATTERN:
        return _run_own_pattern(call)
    if planned.entries_are_equal:
        return _run_entry(call)
    return torch.cat([_run_entry(call.entry(b)) for b in range(len(planned.runs))])


def _run_entry(call: SparseCall) -> Tensor:
    """Run each sequence of a batch entry, or of all entries if they are equal, (B, Lq, Hq, D)."""
    planned, b = call.planned, call.batch_entry
    pieces = []
    for run, reason, plan in zip(planned.runs[b], planned.dense[b], planned.plans[b], strict=True):
        part = call.part(run)
        if reason:
            pieces.append(dense_piece(part.q, part.k, part.v, run, **part.options))
            call.passes.counts.dense_sequences(reason, call.q.shape[0])
        else:
            pieces.append(_run_sequence(part, plan))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _run_sequence(part: SparseCall, plan: LayerPlan) -> Tensor:
    """Run one sequence by the rule of `plan`, (B, n, Hq, D)."""
    index, guard, drawn, scale = part.layer, part.guard, part.drawn, part.form.scores.scale
    q, k, v = part.tokens_first()
    widened = plan if guard is None else guard.plan(index, plan)  # the guard may have widened it
    meter = part.passes.counts.probe
    probe = meter.measured(index, q) if drawn and drawn.measured else meter.start(index, q)
    lead = widened.lead(q.shape[1], k.shape[1])
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, lead, 0)) if lead else q
    layout = widened.layout(q, k, scale=scale)
    probe.selected(layout)
    out = sparse_attention(q, k, v, layout, **part.options)
    probe.done(k, v)
    for watcher in part.passes.watchers:
        watcher(index, layout)
    if lead:
        return out[:, lead:]
    if part.planned.may_prepare and widened is plan:
        prepare(part, layout, plan)
    if guard is not None and (drawn.sampled if drawn else guard.wants_call()):
        guard.take(index, q[:1], k[:1], v[:1], scale, plan, widened, out[:1])
    return out


def _run_own_pattern(call: SparseCall) -> Tensor:
    """Run the model's own pattern, (B, Lq, Hq, D)."""
    (first, *others), (q, k, v) = call.planned.parts, call.tokens_first()
    if others or first.layout is None or not first.covers(q, k):
        return _run_parts(call)
    out = sparse_attention(q, k, v, first.layout, **call.options)
    if call.planned.may_prepare:
        prepare(call, first.layout)
    return out


def _run_parts(call: SparseCall) -> Tensor:
    """Run the model's own pattern part by part, (B, Lq, Hq, D)."""
    q, k, v = call.tokens_first()
    outs: list[list[Tensor]] = []
    entry: int | None = -1
    for part in call.planned.parts:
        rows = slice(None) if part.entry is None else slice(part.entry, part.entry + 1)
        queries = q[rows, part.queries]
        if part.layout is None:
            out = queries.new_zeros(*queries.shape[:3], v.shape[-1])
        else:
            out = sparse_attention(queries, k[rows, part.keys], v[rows, part.keys], part.layout, **call.options)
        if part.entry != entry:
            outs.append([])
            entry = part.entry
        outs[-1].append(out)
    rows_of = [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1) for pieces in outs]
    return rows_of[0] if len(rows_of) == 1 else torch.cat(rows_of)


def sample_disabled(call: SparseCall) -> None:
    """Sample the rule that the guard has disabled, so that the guard can detect a recovery."""
    guard, planned = call.guard, call.planned
    assert guard is not None, "only a guard disables a rule"
    if not guard.wants_call():
        return
    b, i = next((b, i) for b, entry in enumerate(planned.dense) for i, reason in enumerate(entry) if not reason)
    q, k, v = call.entry(b).part(planned.runs[b][i]).tokens_first()
    guard.take(call.layer, q, k, v, call.form.scores.scale, planned.plans[b][i], None, None)


def restore_prepared(call: SparseCall) -> None:
    """Set `planned.prepared` to the call that an earlier pass prepared, if there is one."""
    planned, deployed, (q, k, v) = call.planned, call.current.deployed, call.tokens_first()
    if not _is_whole(planned, q, k):
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
    if len(plan.groups) > 1 or plan is not deployed.plans.get(call.layer):
        return
    rule = plan.groups[0].rule
    assert not isinstance(rule, Pattern), "the plan is not static"
    planned.prepared = prepare_rule(rule, layout, q, k, v, scale=scale, softcap=softcap)
    if planned.prepared is not None:
        kept = deployed.prepared
        if len(kept) >= MAX_CALLS:
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
