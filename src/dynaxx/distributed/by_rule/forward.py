# SPDX-License-Identifier: Apache-2.0
"""The forward pass: select and attend stage by stage, runs over own keys while the others' keys are in transit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.distributed.by_rule.settings import RuleCall
from dynaxx.distributed.gather import Run, WholeGathering
from dynaxx.distributed.streams import BESIDE_COPIES, BESIDE_NCCL, Stages, in_stages
from dynaxx.layout import BlockLayout

OWN_STAGES = 2  # stages whose runs over own keys are computed together: fewer calls, and no long wait of other ranks


class RuleResult(NamedTuple):
    """The result of a forward pass."""

    out: Tensor  # (batch, own tokens, q_heads, head_dim_v)
    lse: Tensor | None  # (batch, q_heads, own tokens), if it is needed
    layouts: list[BlockLayout]  # of all stages and runs, if a backward pass follows


def rule_forward(q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> RuleResult:
    """Select blocks and attend, for own queries."""
    stages = _RuleStages(q, k, v, call)
    ran, key = call.form.ran, ("forward", call.softcap, call.backend, call.needs_grad)
    in_stages(stages, call.group, q.device, known=key in ran)
    ran.add(key)
    stages.buffers.free()  # before the lse of all heads is allocated
    return RuleResult(stages.out, stages.lse() if call.needs_lse else None, stages.layouts)


class _Selected(NamedTuple):
    """The inputs of a stage's kernels: gathered keys and values, and the selected blocks of each run."""

    keys: Tensor
    values: Tensor
    layouts: list[BlockLayout]


class _RuleStages(Stages[_Selected]):
    """The stages of one call.

    Attributes:
        out: the output of all heads.
        buffers: memory of the gathered keys and values.
        layouts: the layouts of all stages and runs, if a backward pass follows.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: RuleCall) -> None:
        self._q, self._k, self._v, self._call = q, k, v, call
        group_size, own = q.shape[2] // k.shape[2], call.own_runs
        self._own_runs, self._runs = call.runs[:own], call.runs[own:]  # see only own keys; see others' too
        self._kv_heads = call.stages_of_heads(k.shape[2])  # by stage
        self._q_heads = [slice(some.start * group_size, some.stop * group_size) for some in self._kv_heads]
        self._gatherings: dict[int, WholeGathering] = {}  # by stage
        self._means: dict[Run, Tensor | None] = {}  # mean queries
        self._lse: list[list[Tensor]] = [[] for _ in self._kv_heads]  # of the runs, by stage
        self.count = len(self._kv_heads)
        self.out = q.new_empty(*q.shape[:3], v.shape[-1])
        self.buffers = call.buffers(k, v)
        self.layouts: list[BlockLayout] = []
        self.sharing = BESIDE_COPIES if self.buffers.by_copy_engines else BESIDE_NCCL
        if self._own_runs:  # with all multiprocessors, which own runs take next
            self._take_means()

    def _take_means(self) -> None:
        for run in self._runs:
            self._means[run] = self._call.means(self._q, run)

    def start(self, i: int) -> None:
        """Start to gather the keys and values of a stage."""
        self._gatherings[i] = self._call.start(self._k, self._v, self._kv_heads[i], self.buffers, i)
        if not i and not self._own_runs:  # while the first keys are in transit
            self._take_means()

    def ahead(self, i: int) -> None:
        """Select and attend for the runs over own keys, of this stage and those computed with it."""
        together = 1 if self._call.needs_grad else OWN_STAGES  # a backward pass wants the layouts of each stage
        if i % together:
            return
        stages = range(i, min(i + together, self.count))
        kv_heads = slice(self._kv_heads[i].start, self._kv_heads[stages[-1]].stop)
        q_heads = slice(self._q_heads[i].start, self._q_heads[stages[-1]].stop)
        for run in self._own_runs:
            keys, values = self._k[:, : run.keys, kv_heads], self._v[:, : run.keys, kv_heads]
            layout = self._select(run, keys, q_heads)
            lse = self._call.attend(self._q, keys, values, layout, run, q_heads, self.out)
            if self._call.needs_lse:
                for stage, part in zip(stages, lse.chunk(len(stages), 1), strict=True):
                    self._lse[stage].append(part)
            if self._call.needs_grad:
                self.layouts.append(layout)

    def ready(self, i: int) -> _Selected:
        """Wait for the keys and values of a stage, and select the blocks of the other runs."""
        keys, values = self._gatherings.pop(i).wait()
        found = [self._select(run, keys[:, : run.keys], self._q_heads[i]) for run in self._runs]
        return _Selected(keys, values, found)

    def _select(self, run: Run, keys: Tensor, q_heads: slice) -> BlockLayout:
        queries = self._q[:, run.first : run.last, q_heads]
        return self._call.select(queries, keys, run, q_heads, self._q.shape[2], self._means.get(run))

    def attend(self, i: int, gathered: _Selected) -> None:
        """Attend for the runs that see keys of other ranks."""
        for run, layout in zip(self._runs, gathered.layouts, strict=True):
            keys, values = gathered.keys[:, : run.keys], gathered.values[:, : run.keys]
            lse = self._call.attend(self._q, keys, values, layout, run, self._q_heads[i], self.out)
            if self._call.needs_lse:
                self._lse[i].append(lse)
        if self._call.needs_grad:
            self.layouts.extend(gathered.layouts)

    def lse(self) -> Tensor:
        """Return the lse of all heads."""
        return torch.cat([torch.cat(runs, 2) if len(runs) > 1 else runs[0] for runs in self._lse], 1)
