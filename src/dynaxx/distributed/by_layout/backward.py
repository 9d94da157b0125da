# SPDX-License-Identifier: Apache-2.0
"""The backward pass over a split sequence: gradients of received keys and values return to their owners."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynaxx.distributed.by_layout.forward import PlannedCall, edge_part, has_edges
from dynaxx.distributed.call import Gradients
from dynaxx.distributed.exchange import Buffers, Gathering, Returning
from dynaxx.distributed.plan import Stage
from dynaxx.distributed.streams import Lanes, exchanges_go_first, in_returning_stages


def split_backward(given: Gradients, call: PlannedCall, _: None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of own tokens, after gradients of received keys and values have returned to their owners."""
    q, k, v = given.q, given.k, given.v
    stages, group = call.plan.backward_stages, call.group
    ran, key = call.plan.ran, ("backward", q.shape, k.shape, v.shape, q.dtype, call.softcap, call.backend)
    if key in ran and len(stages) == 1 and stages[0].inner is not None and q.is_cuda and exchanges_go_first(group):
        return _edges_beside_inner_rows(given, stages[0], call)
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
        own = given.part(heads, k[:, :, kv_heads], v[:, :, kv_heads])
        written, sent = _backward_stage(own, stages[i], gathering, call)
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


def _edges_beside_inner_rows(given: Gradients, stage: Stage, call: PlannedCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv: exchange and compute the edge rows of the only stage while the inner rows are computed."""
    with Lanes.forked(given.q.device) as lanes:
        with torch.cuda.stream(lanes.helper):
            gathering = Gathering(given.k, given.v, stage, call.group)
        assert stage.inner is not None, "called for stages with inner rows"
        dq, dk, dv = call.backward(given, stage.inner)
        with torch.cuda.stream(lanes.helper):
            edge_dq, sent = _edge_backward(given, gathering.wait(), stage, call)
            returning = Returning(*sent, stage, call.group)
    _write_edges(dq, edge_dq, stage)
    returning.wait(dk, dv)
    return dq, dk, dv


def _edge_backward(
    own: Gradients, buffer: tuple[Tensor, Tensor], stage: Stage, call: PlannedCall
) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """Return dq of the edge rows of a stage's heads, and the gradients of the gathered keys and values in the buffer.

    The buffer is empty if there are no edge rows.
    """
    if not has_edges(stage):
        return None, buffer
    rows = lambda x, dim: edge_part(x, stage, dim).contiguous() if dim == 2 else edge_part(x, stage, dim)
    dq, *sent = call.backward(own.part(slice(None), *buffer, rows), stage.layout)
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
    own: Gradients, stage: Stage, gathering: Gathering, call: PlannedCall
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Return dq, or with inner rows dq, dk and dv, of a stage's heads, and the gradients of the buffer.

    The keys and values of `gathering` may still be in transit.
    """
    if stage.inner is None or stage.rows is None:
        keys, values = gathering.wait()
        dq, dk, dv = call.backward(own._replace(k=keys, v=values), stage.layout)
        return (dq,), (dk, dv)
    written = call.backward(own, stage.inner)
    edge_dq, sent = _edge_backward(own, gathering.wait(), stage, call)
    _write_edges(written[0], edge_dq, stage)
    return written, sent
