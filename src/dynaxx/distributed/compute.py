# SPDX-License-Identifier: Apache-2.0
"""The computation of one rank for attention over a split sequence: stage by stage, inner rows before edge rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynaxx.distributed.exchange import Buffers, Gathering, Returning
from dynaxx.distributed.peer_memory import stage_buffers
from dynaxx.distributed.plan import ExchangePlan, Stage
from dynaxx.distributed.streams import (
    BESIDE_COPIES,
    BESIDE_NCCL,
    Before,
    Lanes,
    exchanges_go_first,
    in_returning_stages,
    in_stages,
)
from dynaxx.kernels.gpu.schedule.waves import Sharing, share_multiprocessors
from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import choose_backend, load_backend, score_options
from dynaxx.ops.merge import merge_states

FEW_LEFT = 1 << 17  # tokens of a stage whose kernels take so long that copies need few multiprocessors


class Settings(NamedTuple):
    """The arguments of a call other than its tensors."""

    plan: ExchangePlan
    group: ProcessGroup
    scale: float
    softcap: float | None
    backend: str
    needs_grad: bool
    needs_lse: bool

    def kernels(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Any:
        """Return the backend for one layout of the plan, chosen once per combination of shapes."""
        key = (id(layout), q.shape, k.shape, v.shape, q.dtype, self.softcap, self.backend, self.needs_grad)
        known = self.plan.backends
        if key not in known:
            problem = check_inputs(q, k, v, layout, softcap=self.softcap, needs_grad=self.needs_grad)
            known[key] = choose_backend(problem, self.backend)
        return load_backend(known[key])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of one layout; a given `out` receives the result."""
        kernels = self.kernels(q, k, v, layout)
        found: tuple[Tensor, Tensor] = kernels.attention_forward(
            q, k, v, layout, self.scale, out=out, **score_options(self.softcap)
        )
        return found

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: BlockLayout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one layout."""
        kernels = self.kernels(q, k, v, layout)
        found: tuple[Tensor, Tensor, Tensor] = kernels.attention_backward(
            do, dlse, q, k, v, out, lse, layout, self.scale, **score_options(self.softcap)
        )
        return found


def split_forward(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor | None]:
    """Return out (batch, own tokens, q_heads, head_dim_v), and lse (batch, q_heads, own tokens) if it is needed."""
    stages, group = settings.plan.stages, settings.group
    halves = stages[0].halves  # own tokens while the first stage is exchanged; the others come last
    order = [*range(1, len(stages)), 0]  # equal on all ranks
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lses: dict[int, Tensor] = {}
    buffers = _buffers(k, v, settings)
    gatherings: dict[int, Gathering] = {}
    inner: dict[int, Tensor] = {}  # lse of the inner rows by stage

    def start(turn: int) -> None:
        gatherings[turn] = Gathering(k, v, stages[order[turn]], group, buffers, turn)

    def ready(turn: int) -> tuple[Tensor, Tensor]:
        return gatherings.pop(turn).wait()

    def attend(turn: int, gathered: tuple[Tensor, Tensor]) -> None:
        i = order[turn]
        stage = stages[i]
        heads = slice(*stage.q_heads)
        own = q[:, :, heads], out[:, :, heads]
        if stage.inner is not None:
            lse = _edge_rows(*own, inner[i], gathered, stage, settings)
        elif i or halves is None:
            lse = settings.forward(own[0], *gathered, stage.layout, own[1])[1]
        else:
            place, lse = buffers.take(turn + 1, q, own[1].shape), lses[0]
            found = settings.forward(own[0], *gathered, halves[1], place)
            _merge_into(own[1], lse, *found, halves[1])
        if settings.needs_lse:
            lses[i] = lse

    def own_tokens() -> None:
        some = (slice(None), slice(None), slice(*stages[0].q_heads))
        of_kv = (slice(None), slice(None), slice(*stages[0].kv_heads))
        assert halves is not None, "called with halves"
        with share_multiprocessors(BESIDE_COPIES if buffers.by_copy_engines else None):  # half as long as a stage
            lses[0] = settings.forward(q[some], k[of_kv], v[of_kv], halves[0], out[some])[1]

    def inner_rows() -> None:
        for i, stage in enumerate(stages):
            if stage.inner is not None:
                heads, kv_heads = slice(*stage.q_heads), slice(*stage.kv_heads)
                keys, values = k[:, :, kv_heads], v[:, :, kv_heads]
                if stage.rest is None:
                    inner[i] = settings.forward(q[:, :, heads], keys, values, stage.inner, out[:, :, heads])[1]
                else:
                    rows = (slice(None), stage.rest[0], heads)
                    inner[i] = settings.forward(q[rows], keys, values, stage.rest[1], out[rows])[1]

    with_inner = [stage for stage in stages if stage.inner is not None]
    apart = all(stage.rest is not None or not _has_edges(stage) for stage in with_inner)
    early = Before(inner_rows, apart, waits=apart) if with_inner else None
    if halves is not None:
        early = Before(own_tokens, apart=True)
    ran = settings.plan.ran
    key = (q.shape, k.shape, v.shape, q.dtype, settings.softcap, settings.backend, halves is None)
    in_stages(
        len(stages), start, ready, attend, group, q.device, early, key in ran, halves is not None,
        sharing=_sharing(stages, buffers),
    )  # fmt: skip
    ran.add(key)
    buffers.free()  # before the lse of all heads is allocated
    if not settings.needs_lse:
        return out, None
    for i, stage in enumerate(stages):
        if stage.rest is not None:
            parts = (lses[i], inner[i]) if stage.rest[0].start else (inner[i], lses[i])
            lses[i] = torch.cat(parts, 2)
    return out, lses[0] if len(stages) == 1 else torch.cat([lses[i] for i in range(len(stages))], 1)


def _sharing(stages: tuple[Stage, ...], buffers: Buffers) -> Sharing:
    """Return how the kernels share the multiprocessors with exchanges."""
    halo = len(stages) == 1 and stages[0].inner is not None
    if len(stages) == 1 and not halo:
        return Sharing()  # the kernels wait for the exchange
    if not buffers.by_copy_engines:
        return BESIDE_NCCL._replace(waves=32) if halo else BESIDE_NCCL
    if halo or stages[0].tokens >= FEW_LEFT:
        return BESIDE_COPIES._replace(left=1 if halo else 2)
    return BESIDE_COPIES


def _buffers(k: Tensor, v: Tensor, settings: Settings) -> Buffers:
    """Return the buffers of the stages, which other ranks may write to."""
    token_bytes = k.shape[0] * (k.shape[-1] + v.shape[-1]) * k.itemsize
    return stage_buffers(settings.group, k.device, settings.plan.most_tokens * token_bytes)


def _merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, layout: BlockLayout) -> None:
    """Overwrite `out` and `lse` with the result over the keys of both results."""
    if out.is_cuda:
        from dynaxx.kernels.gpu.merge import merge_into

        merge_into(out, lse, other, other_lse, layout)
        return
    merged = merge_states([(out, lse), (other, other_lse)])
    out.copy_(merged.out)
    lse.copy_(merged.lse)


def _edge_rows(
    q: Tensor, out: Tensor, lse: Tensor, gathered: tuple[Tensor, Tensor], stage: Stage, settings: Settings
) -> Tensor:
    """Write the rows that visit blocks of other ranks to `out`, and return the lse of all rows.

    Args:
        q: queries of the stage's heads.
        out: output of all rows; that of the inner rows may not be written yet if they are a part of their own.
        lse: lse of the inner rows, of all rows unless they are a part of their own.
        gathered: keys and values.
        stage: the stage.
        settings: arguments of the call.
    """
    if not _has_edges(stage):
        return lse
    assert stage.rows is not None, "a stage with inner rows lists its edge rows"
    place = None if stage.run is None else out[:, stage.run]
    edge_out, edge_lse = settings.forward(_edge(q, stage, 1), *gathered, stage.layout, place)
    if stage.rest is not None:
        return edge_lse
    if place is None:
        out.index_copy_(1, stage.rows, edge_out)
        lse.index_copy_(2, stage.rows, edge_lse)
    else:
        lse[:, :, stage.run] = edge_lse
    return lse


def _has_edges(stage: Stage) -> bool:
    """Return whether some rows visit blocks of other ranks."""
    return stage.rows is not None and bool(stage.rows.numel())


def _edge(x: Tensor, stage: Stage, dim: int) -> Tensor:
    """Return the edge rows of x along a dimension, without a copy where they are neighbours."""
    assert stage.rows is not None, "called for stages with inner rows"
    run = stage.run
    return x.index_select(dim, stage.rows) if run is None else x.narrow(dim, run.start, run.stop - run.start)


def split_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of own tokens, after gradients of received keys and values have returned to their owners."""
    stages, group = settings.plan.backward_stages, settings.group
    ran, key = settings.plan.ran, ("backward", q.shape, k.shape, v.shape, q.dtype, settings.softcap, settings.backend)
    if key in ran and len(stages) == 1 and stages[0].inner is not None and q.is_cuda and exchanges_go_first(group):
        return _edges_beside_inner_rows((do, dlse, q), (k, v), (out, lse), stages[0], settings)
    alone = len(stages) == 1
    fresh = lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
    grads = [] if alone else [fresh(q), fresh(k), fresh(v)]
    buffers = Buffers()
    gatherings: dict[int, Gathering] = {}

    def start(i: int) -> None:
        gatherings[i] = Gathering(k, v, stages[i], group, buffers, i)

    def ready(i: int) -> Gathering:
        if stages[i].inner is None:  # otherwise, the inner rows come first
            gatherings[i].wait()
        return gatherings.pop(i)

    def compute(i: int, gathering: Gathering) -> tuple[Tensor, Tensor]:
        heads, kv_heads = slice(*stages[i].q_heads), slice(*stages[i].kv_heads)
        own = do[:, :, heads], None if dlse is None else dlse[:, heads], q[:, :, heads]
        own_kv, results = (k[:, :, kv_heads], v[:, :, kv_heads]), (out[:, :, heads], lse[:, heads])
        written, sent = _backward_stage(own, own_kv, results, stages[i], gathering, settings)
        if alone:
            grads.extend([*written, *map(fresh, (k, v))][:3])
        else:
            for total, part, some in zip(grads, written, (heads, kv_heads, kv_heads), strict=False):
                total[:, :, some] = part
        return sent

    def give_back(i: int, sent: tuple[Tensor, Tensor]) -> Callable[[], None]:
        returning = Returning(*sent, stages[i], group)
        return lambda: returning.wait(*grads[1:])

    in_returning_stages(len(stages), start, ready, compute, give_back)
    ran.add(key)
    return grads[0], grads[1], grads[2]


def _edges_beside_inner_rows(
    own: tuple[Tensor, Tensor | None, Tensor],
    own_kv: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    stage: Stage,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv: exchange and compute the edge rows while the inner rows are computed.

    Args:
        own: do, dlse and q.
        own_kv: k and v.
        results: out and lse.
        stage: the only stage.
        settings: arguments of the call.
    """
    with Lanes.forked(own[2].device) as lanes:
        with torch.cuda.stream(lanes.helper):
            gathering = Gathering(*own_kv, stage, settings.group)
        assert stage.inner is not None, "called for stages with inner rows"
        dq, dk, dv = settings.backward(*own, *own_kv, *results, stage.inner)
        with torch.cuda.stream(lanes.helper):
            edge_dq, sent = _edge_backward(own, results, gathering.wait(), stage, settings)
            returning = Returning(*sent, stage, settings.group)
    _write_edges(dq, edge_dq, stage)
    returning.wait(dk, dv)
    return dq, dk, dv


def _edge_backward(
    own: tuple[Tensor, Tensor | None, Tensor],
    results: tuple[Tensor, Tensor],
    buffer: tuple[Tensor, Tensor],
    stage: Stage,
    settings: Settings,
) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """Return dq of the edge rows, and the gradients of the keys and values in the buffer.

    Args:
        own: do, dlse and q of the stage's heads.
        results: out and lse of these heads.
        buffer: gathered keys and values; empty if there are no edge rows.
        stage: the stage.
        settings: arguments of the call.
    """
    if not _has_edges(stage):
        return None, buffer
    dlse = None if own[1] is None else _edge(own[1], stage, 2).contiguous()
    edge_results = _edge(results[0], stage, 1), _edge(results[1], stage, 2).contiguous()
    queries = _edge(own[2], stage, 1)
    dq, *sent = settings.backward(_edge(own[0], stage, 1), dlse, queries, *buffer, *edge_results, stage.layout)
    return dq, (sent[0], sent[1])


def _write_edges(dq: Tensor, edge_dq: Tensor | None, stage: Stage) -> None:
    """Write dq of the edge rows into that of all rows."""
    if edge_dq is None or stage.rows is None:
        return
    if stage.run is None:
        dq.index_copy_(1, stage.rows, edge_dq)
    else:
        dq[:, stage.run] = edge_dq


def _backward_stage(
    own: tuple[Tensor, Tensor | None, Tensor],
    own_kv: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    stage: Stage,
    gathering: Gathering,
    settings: Settings,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return dq, or with inner rows dq, dk and dv, of a stage's heads, and the gradients of the buffer.

    Args:
        own: do, dlse and q of the stage's heads.
        own_kv: own keys and values of these heads.
        results: out and lse of these heads.
        stage: the stage.
        gathering: its keys and values, which may still be in transit.
        settings: arguments of the call.
    """
    if stage.inner is None or stage.rows is None:
        dq, dk, dv = settings.backward(*own, *gathering.wait(), *results, stage.layout)
        return (dq,), (dk, dv)
    written = settings.backward(*own, *own_kv, *results, stage.inner)
    edge_dq, sent = _edge_backward(own, results, gathering.wait(), stage, settings)
    _write_edges(written[0], edge_dq, stage)
    return written, sent
