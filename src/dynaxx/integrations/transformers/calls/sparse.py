# SPDX-License-Identifier: Apache-2.0
"""Run a call on dynaxx's kernels: by a rule, with one layout per sequence, or with the model's own pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from dynaxx.integrations.runtime.guarding import LiveGuard
from dynaxx.integrations.runtime.routing import Route
from dynaxx.integrations.transformers.calls.arguments import Signature
from dynaxx.integrations.transformers.calls.dense_fallback import dense_piece
from dynaxx.integrations.transformers.calls.planning import CallPlan
from dynaxx.integrations.transformers.forward_context import ForwardContext, Place
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.integrations.transformers.repeats.prepared import prepare
from dynaxx.ops import sparse_attention
from dynaxx.ops.autocast import follow_autocast
from dynaxx.policy import LayerPlan

if TYPE_CHECKING:
    from dynaxx.integrations.transformers.calls.layer import Layer


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

    layer: Layer
    current: ForwardContext
    planned: CallPlan
    form: Signature
    guard: LiveGuard | None
    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hk, Lk, D)
    v: Tensor  # (B, Hk, Lk, E)
    sinks: Tensor | None  # (Hq,)
    place: Place = (0, None)  # batch entry and run of a sequence
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
        return self._replace(q=self.q[b : b + 1], k=self.k[b : b + 1], v=self.v[b : b + 1], place=(b, None))

    def part(self, run: MaskRun) -> SparseCall:
        """Return the call of one run."""
        place = (self.place[0], run)
        if run[:4] == (0, self.q.shape[2], 0, self.k.shape[2]):  # the run is the whole call
            return self._replace(place=place)
        rows, keys = slice(run.q_start, run.q_stop), slice(run.k_start, run.k_stop)
        return self._replace(q=self.q[:, :, rows], k=self.k[:, :, keys], v=self.v[:, :, keys], place=place)


def run_sparse(call: SparseCall) -> Tensor:
    """Run a call by a rule or by the model's own pattern, (B, Lq, Hq, D)."""
    planned = call.planned
    for fault in call.layer.handle.faults:
        fault(call.layer.index)
    if planned.route is Route.OWN_PATTERN:
        return _run_own_pattern(call)
    if planned.entries_are_equal:
        return _run_entry(call)
    return torch.cat([_run_entry(call.entry(b)) for b in range(len(planned.runs))])


def _run_entry(call: SparseCall) -> Tensor:
    """Run each sequence of a batch entry, or of all entries if they are equal, (B, Lq, Hq, D)."""
    planned, b = call.planned, call.place[0]
    pieces = []
    for run, reason, plan in zip(planned.runs[b], planned.dense[b], planned.plans[b], strict=True):
        part = call.part(run)
        if reason:
            pieces.append(dense_piece(part.q, part.k, part.v, run, **part.options))
            call.layer.handle.counts.dense_sequences(reason, call.q.shape[0])
        else:
            pieces.append(_run_sequence(part, plan))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _run_sequence(part: SparseCall, plan: LayerPlan) -> Tensor:
    """Run one sequence by the rule of `plan`, (B, n, Hq, D)."""
    layer, guard, drawn, scale = part.layer, part.guard, part.drawn, part.form.scores.scale
    q, k, v = part.tokens_first()
    widened = plan if guard is None else guard.plan(layer.index, plan)  # the guard may have widened it
    meter = layer.handle.counts.probe
    probe = meter.measured(layer.index, q) if drawn and drawn.measured else meter.start(layer.index, q)
    lead = widened.lead(q.shape[1], k.shape[1])
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, lead, 0)) if lead else q
    read = part.current.layout(layer.index, part.place, widened)  # the blocks that another layer chose
    layout = read or widened.layout(q, k, scale=scale)
    part.current.keep(layer.index, part.place, widened, layout)
    probe.selected(layout)
    out = sparse_attention(q, k, v, layout, **part.options)
    probe.done(k, v)
    for watcher in layer.handle.watchers:
        watcher(layer.index, layout)
    if lead:
        return out[:, lead:]
    if part.planned.may_prepare and widened is plan:
        prepare(part, layout, plan)
    if guard is not None and (drawn.sampled if drawn else guard.wants_call()):
        guard.take(layer.index, q[:1], k[:1], v[:1], scale, plan, widened, out[:1], read)
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
    guard.take(call.layer.index, q, k, v, call.form.scores.scale, planned.plans[b][i], None, None)
