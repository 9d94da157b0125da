# SPDX-License-Identifier: Apache-2.0
"""The backward pass: gather keys and values again, and return their gradients to their owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynaxx.distributed.by_rule.settings import RuleCall
from dynaxx.distributed.exchange import Buffers
from dynaxx.distributed.gather import ReturningRuns, WholeGathering, sum_of_runs
from dynaxx.distributed.streams import in_returning_stages
from dynaxx.layout import BlockLayout


def rule_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: RuleCall,
    chosen: list[BlockLayout],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of own tokens; `chosen` are the layouts of all stages and runs from `rule_forward`."""
    group_size, layouts = q.shape[2] // k.shape[2], iter(chosen)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    parts, runs, dims = call.stages_of_heads(k.shape[2]), call.runs, [k.shape[-1], v.shape[-1]]
    buffers = Buffers()
    gatherings: dict[int, WholeGathering] = {}

    def start(i: int) -> None:
        gatherings[i] = call.start(k, v, parts[i], buffers, i)

    def compute(i: int, gathered: list[Tensor]) -> list[tuple[Sequence[Tensor], int]]:
        keys, values = gathered
        q_heads = slice(parts[i].start * group_size, parts[i].stop * group_size)
        of_runs: list[tuple[Sequence[Tensor], int]] = []
        for run in runs:
            own, layout = (slice(None), slice(run.first, run.last), q_heads), next(layouts)
            seen = keys[:, : run.keys], values[:, : run.keys]
            dlse_of_run = None if dlse is None else dlse[:, q_heads, run.first : run.last]
            lse_of_run = lse[:, q_heads, run.first : run.last]
            dq[own], *grads = call.backward(do[own], dlse_of_run, q[own], *seen, out[own], lse_of_run, layout)
            of_runs.append((grads, run.keys))
        return of_runs

    def give_back(i: int, of_runs: list[tuple[Sequence[Tensor], int]]) -> Callable[[], None]:
        heads = parts[i].stop - parts[i].start
        total = sum_of_runs(of_runs, dims, k.new_empty(call.reach[call.rank], k.shape[0], heads, 0))
        returning = ReturningRuns(total, call.split, call.rank, call.group, call.reach)

        def finish() -> None:
            own_sum = returning.wait().transpose(0, 1)
            dk[:, :, parts[i]], dv[:, :, parts[i]] = own_sum.split(dims, dim=-1)

        return finish

    in_returning_stages(len(parts), start, lambda i: gatherings.pop(i).wait(), compute, give_back)
    return dq, dk, dv
