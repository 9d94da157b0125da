# SPDX-License-Identifier: Apache-2.0
"""The forward pass over a split sequence: rows and tokens that need no exchange run while it is in transit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.distributed.call import Call
from dynaxx.distributed.exchange import Buffers, Gathering
from dynaxx.distributed.peer_memory import stage_buffers
from dynaxx.distributed.plan import ExchangePlan, Stage
from dynaxx.distributed.streams import BESIDE_COPIES, BESIDE_NCCL, Early, Stages, in_stages
from dynaxx.kernels.schedule.waves import Sharing, share_multiprocessors
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import merge_states

FEW_LEFT = 1 << 17  # tokens of a stage whose kernels take so long that copies need few multiprocessors


@dataclass(frozen=True)
class PlannedCall(Call):
    """A call over a layout whose sequence is split."""

    plan: ExchangePlan


def split_forward(q: Tensor, k: Tensor, v: Tensor, call: PlannedCall) -> tuple[Tensor, Tensor | None, None]:
    """Return out (batch, own tokens, q_heads, head_dim_v), and lse (batch, q_heads, own tokens) if it is needed."""
    ran, stages = call.plan.ran, _ForwardStages(q, k, v, call)
    key = (q.shape, k.shape, v.shape, q.dtype, call.softcap, call.backend, stages.halves is None)
    in_stages(stages, call.group, q.device, known=key in ran)
    ran.add(key)
    stages.buffers.free()  # before the lse of all heads is allocated
    return stages.out, stages.lse() if call.needs_lse else None, None


class _ForwardStages(Stages[tuple[Tensor, Tensor]]):
    """The stages of one call. The first stage of the plan comes last, because its own tokens are computed early.

    Attributes:
        halves: layouts of the first stage over own and over received tokens; None unless it is computed in two parts.
        out: the output of all heads.
        buffers: memory of the gathered keys and values.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: PlannedCall) -> None:
        plan = call.plan.stages
        self._q, self._k, self._v, self._call, self._plan = q, k, v, call, plan
        self._order = [*range(1, len(plan)), 0]  # equal on all ranks
        self._gatherings: dict[int, Gathering] = {}  # by turn
        self._inner_lse: dict[int, Tensor] = {}  # of the inner rows, by stage
        self._lse: dict[int, Tensor] = {}  # of all rows, by stage; of the edge rows if the inner rows are apart
        self.count = len(plan)
        self.halves = plan[0].halves
        self.out = q.new_empty(*q.shape[:3], v.shape[-1])
        self.buffers = _buffers(k, v, call)
        self.early = _early(plan)
        self.last_alone = self.halves is not None
        self.sharing = _sharing(plan, self.buffers)

    def start(self, i: int) -> None:
        """Start the exchange of turn `i`."""
        stage = self._plan[self._order[i]]
        self._gatherings[i] = Gathering(self._k, self._v, stage, self._call.group, self.buffers, i)

    def ready(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of turn `i`."""
        return self._gatherings.pop(i).wait()

    def attend(self, i: int, gathered: tuple[Tensor, Tensor]) -> None:
        """Compute the rows that need the keys and values of turn `i`."""
        number = self._order[i]
        stage = self._plan[number]
        heads = slice(*stage.q_heads)
        q, out = self._q[:, :, heads], self.out[:, :, heads]
        if stage.inner is not None:
            lse = _edge_rows(q, out, self._inner_lse[number], gathered, stage, self._call)
        elif number or self.halves is None:
            lse = self._call.forward(q, *gathered, stage.layout, out)[1]
        else:
            place, lse = self.buffers.take(i + 1, q, out.shape), self._lse[0]
            received = self._call.forward(q, *gathered, self.halves[1], place)
            _merge_into(out, lse, *received, self.halves[1])
        if self._call.needs_lse:
            self._lse[number] = lse

    def launch_early(self) -> None:
        """Compute own tokens of the first stage, or its inner rows, and the inner rows of the other stages."""
        if self.halves is not None:
            self._compute_own_tokens(self.halves[0])
        for number, stage in enumerate(self._plan):
            if stage.inner is not None:
                self._inner_lse[number] = self._compute_inner_rows(stage, stage.inner)

    def _compute_own_tokens(self, layout: BlockLayout) -> None:
        heads, kv_heads = _heads(self._plan[0])
        beside = BESIDE_COPIES if self.buffers.by_copy_engines else None  # these kernels take half a stage's time
        with share_multiprocessors(beside):
            keys, values = self._k[kv_heads], self._v[kv_heads]
            self._lse[0] = self._call.forward(self._q[heads], keys, values, layout, self.out[heads])[1]

    def _compute_inner_rows(self, stage: Stage, layout: BlockLayout) -> Tensor:
        rows, kv_heads = _heads(stage)
        if stage.rest is not None:
            rows, layout = (slice(None), stage.rest[0], slice(*stage.q_heads)), stage.rest[1]
        return self._call.forward(self._q[rows], self._k[kv_heads], self._v[kv_heads], layout, self.out[rows])[1]

    def lse(self) -> Tensor:
        """Return the lse of all heads."""
        found = []
        for number, stage in enumerate(self._plan):
            lse = self._lse[number]
            if stage.rest is not None:
                inner = self._inner_lse[number]
                lse = torch.cat((lse, inner) if stage.rest[0].start else (inner, lse), 2)
            found.append(lse)
        return found[0] if self.count == 1 else torch.cat(found, 1)


def _heads(stage: Stage) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """Return the places of a stage's q heads and kv heads in tensors of all heads."""
    everything = slice(None)
    return (everything, everything, slice(*stage.q_heads)), (everything, everything, slice(*stage.kv_heads))


def _early(plan: tuple[Stage, ...]) -> Early | None:
    """Return how the stages run beside the kernels that need no exchange; None if there are none."""
    with_inner = [stage for stage in plan if stage.inner is not None]
    apart = all(stage.rest is not None or not has_edges(stage) for stage in with_inner)
    if plan[0].halves is not None:
        return Early(apart)
    return Early(apart, waits=apart) if with_inner else None


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


def _buffers(k: Tensor, v: Tensor, call: PlannedCall) -> Buffers:
    """Return the buffers of the stages, which other ranks may write to."""
    token_bytes = k.shape[0] * (k.shape[-1] + v.shape[-1]) * k.itemsize
    return stage_buffers(call.group, k.device, call.plan.most_tokens * token_bytes)


def _merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, layout: BlockLayout) -> None:
    """Overwrite `out` and `lse` with the result over the keys of both results."""
    if out.is_cuda:
        from dynaxx.kernels.primitives.merge import merge_into

        merge_into(out, lse, other, other_lse, layout)
        return
    merged = merge_states([(out, lse), (other, other_lse)])
    out.copy_(merged.out)
    lse.copy_(merged.lse)


def _edge_rows(
    q: Tensor, out: Tensor, lse: Tensor, gathered: tuple[Tensor, Tensor], stage: Stage, call: PlannedCall
) -> Tensor:
    """Write the rows that visit blocks of other ranks to `out`, and return the lse of all rows.

    Args:
        q: queries of the stage's heads.
        out: output of all rows; that of the inner rows may not be written yet if they are a part of their own.
        lse: lse of the inner rows, of all rows unless they are a part of their own.
        gathered: keys and values.
        stage: the stage.
        call: arguments of the call.
    """
    if not has_edges(stage):
        return lse
    assert stage.rows is not None, "a stage with inner rows lists its edge rows"
    place = None if stage.run is None else out[:, stage.run]
    edge_out, edge_lse = call.forward(edge_part(q, stage, 1), *gathered, stage.layout, place)
    if stage.rest is not None:
        return edge_lse
    if place is None:
        out.index_copy_(1, stage.rows, edge_out)
        lse.index_copy_(2, stage.rows, edge_lse)
    else:
        lse[:, :, stage.run] = edge_lse
    return lse


def has_edges(stage: Stage) -> bool:
    """Return whether some rows visit blocks of other ranks."""
    return stage.rows is not None and bool(stage.rows.numel())


def edge_part(x: Tensor, stage: Stage, dim: int) -> Tensor:
    """Return the edge rows of x along a dimension, without a copy where they are neighbours."""
    assert stage.rows is not None, "called for stages with inner rows"
    run = stage.run
    return x.index_select(dim, stage.rows) if run is None else x.narrow(dim, run.start, run.stop - run.start)
