# SPDX-License-Identifier: Apache-2.0
"""The backward pass over a split sequence: gradients of received keys and values return to their owners."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynaxx.distributed.by_layout.forward import PlannedCall, edge_part, has_edges
from dynaxx.distributed.exchange import Buffers, Gathering, Returning
from dynaxx.distributed.plan import Stage
from dynaxx.distributed.streams import Lanes, exchanges_go_first, in_returning_stages


def split_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: PlannedCall,
    _: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of own tokens, after gradients of received keys and values have returned to their owners."""
    stages, group = call.plan.backward_stages, call.group
    ran, key = call.plan.ran, ("backward", q.shape, k.shape, v.shape, q.dtype, call.softcap, call.backend)
    if key in ran and len(stages) == 1 and stages[0].inner is not None and q.is_cuda and exchanges_go_first(group):
        return _edges_beside_inner_rows((do, dlse, q), (k, v), (out, lse), stages[0], call)
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
        written, sent = _backward_stage(own, own_kv, results, stages[i], gathering, call)
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
    call: PlannedCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv: exchange and compute the edge rows while the inner rows are computed.

    Args:
        own: do, dlse and q.
        own_kv: k and v.
        results: out and lse.
        stage: the only stage.
        call: arguments of the call.
    """
    with Lanes.forked(own[2].device) as lanes:
        with torch.cuda.stream(lanes.helper):
            gathering = Gathering(*own_kv, stage, call.group)
        assert stage.inner is not None, "called for stages with inner rows"
        dq, dk, dv = call.backward(*own, *own_kv, *results, stage.inner)
        with torch.cuda.stream(lanes.helper):
            edge_dq, sent = _edge_backward(own, results, gathering.wait(), stage, call)
            returning = Returning(*sent, stage, call.group)
    _write_edges(dq, edge_dq, stage)
    returning.wait(dk, dv)
    return dq, dk, dv


def _edge_backward(
    own: tuple[Tensor, Tensor | None, Tensor],
    results: tuple[Tensor, Tensor],
    buffer: tuple[Tensor, Tensor],
    stage: Stage,
    call: PlannedCall,
) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """Return dq of the edge rows, and the gradients of the keys and values in the buffer.

    Args:
        own: do, dlse and q of the stage's heads.
        results: out and lse of these heads.
        buffer: gathered keys and values; empty if there are no edge rows.
        stage: the stage.
        call: arguments of the call.
    """
    if not has_edges(stage):
        return None, buffer
    dlse = None if own[1] is None else edge_part(own[1], stage, 2).contiguous()
    edge_results = edge_part(results[0], stage, 1), edge_part(results[1], stage, 2).contiguous()
    queries = edge_part(own[2], stage, 1)
    dq, *sent = call.backward(edge_part(own[0], stage, 1), dlse, queries, *buffer, *edge_results, stage.layout)
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
    call: PlannedCall,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return dq, or with inner rows dq, dk and dv, of a stage's heads, and the gradients of the buffer.

    Args:
        own: do, dlse and q of the stage's heads.
        own_kv: own keys and values of these heads.
        results: out and lse of these heads.
        stage: the stage.
        gathering: its keys and values, which may still be in transit.
        call: arguments of the call.
    """
    if stage.inner is None or stage.rows is None:
        dq, dk, dv = call.backward(*own, *gathering.wait(), *results, stage.layout)
        return (dq,), (dk, dv)
    written = call.backward(*own, *own_kv, *results, stage.inner)
    edge_dq, sent = _edge_backward(own, results, gathering.wait(), stage, call)
    _write_edges(written[0], edge_dq, stage)
    return written, sent
