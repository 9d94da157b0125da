# SPDX-License-Identifier: Apache-2.0
"""`RuleCall`: a call whose blocks a rule selects, and the selection for one run of queries."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.distributed.call import Call
from dynaxx.distributed.exchange import Buffers
from dynaxx.distributed.gather import Run, WholeGathering, query_runs, reaches
from dynaxx.distributed.peer_memory import stage_buffers
from dynaxx.distributed.rules import rule_of_heads, rule_of_run
from dynaxx.distributed.split import SequenceSplit
from dynaxx.distributed.summaries import by_mean_queries, mean_queries
from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.host import on_host
from dynaxx.selection import Hybrid, Selector, select_blocks
from dynaxx.selection.device import select_on_device, serves
from dynaxx.selection.scorers.base import GPU_MEMORY_BUDGET


class Form(NamedTuple):
    """The state that calls share if their arguments are equal but for the contents of tensors."""

    stages: int
    ran: set[Hashable]  # passes that have run


@dataclass(frozen=True)
class RuleCall(Call):
    """A call whose blocks a rule selects among the keys of all ranks."""

    rule: Selector | Hybrid
    split: SequenceSplit
    rank: int
    causal: bool
    sizes: tuple[int, int]
    form: Form

    @property
    def stages(self) -> int:
        """The number of groups of kv heads that are processed one after another."""
        return self.form.stages

    @property
    def runs(self) -> list[Run]:
        """The runs of queries of this rank."""
        return query_runs(self.split, self.rank, self.causal)

    @property
    def reach(self) -> tuple[int, ...]:
        """The tokens that each rank gathers."""
        return reaches(self.split, self.causal)

    @property
    def own_runs(self) -> int:
        """Number of runs that see only own keys, which are the first ones of this rank."""
        first = self.split.runs(self.rank)[:1]
        return int(bool(first) and first[0][0] == 0 and self.runs[0].keys == first[0][1])

    def means(self, q: Tensor, run: Run) -> Tensor | None:
        """Return the mean queries of a run, (batch, rows, q_heads, head_dim), if selections on a GPU may use them."""
        heads = q.shape[2]
        rule = _rule_of(self.rule, (0, heads), heads, run, self.split)
        grid = BlockGrid(run.last - run.first, run.keys, self.sizes, self.causal)
        if not q.is_cuda or not _selects_on_device(rule, grid, (q.shape[0], grid.seqlen_q, *q.shape[2:]), q.device):
            return None
        selector = rule.selector if isinstance(rule, Hybrid) else rule
        return mean_queries(q[:, run.first : run.last], selector, self.sizes[0], self.scale)

    def select(
        self, q: Tensor, k: Tensor, run: Run, q_heads: slice, heads: int, means: Tensor | None = None
    ) -> BlockLayout:
        """Return the blocks of one run of queries, for some of the `heads` q heads.

        Args:
            q: queries of the run and of these heads.
            k: keys that the run may see.
            run: the run.
            q_heads: the heads.
            heads: number of all q heads.
            means: mean queries of the run and of all q heads.
        """
        rule = _rule_of(self.rule, (q_heads.start, q_heads.stop), heads, run, self.split)
        grid = BlockGrid(q.shape[1], k.shape[1], self.sizes, self.causal)
        if q.is_cuda and _selects_on_device(rule, grid, q.shape, q.device):
            pattern, selector = (rule.pattern, rule.selector) if isinstance(rule, Hybrid) else (None, rule)
            if means is not None:
                q, selector = means[:, :, q_heads], by_mean_queries(selector)
            return _select_on_device(q, k, pattern, selector, grid, self.scale, GPU_MEMORY_BUDGET)
        return select_blocks(q, k, rule, causal=self.causal, block_size=self.sizes, scale=self.scale)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, run: Run, q_heads: slice, out: Tensor
    ) -> Tensor:
        """Write the output of a run of queries for some q heads to `out`, that of all own queries; return the lse."""
        rows = (slice(None), slice(run.first, run.last), q_heads)
        return self.forward(q[rows], k, v, layout, out[rows])[1]

    def stages_of_heads(self, kv_heads: int) -> list[slice]:
        """Return the kv heads of each stage."""
        step = kv_heads // self.stages
        return [slice(first, first + step) for first in range(0, kv_heads, step)]

    def buffers(self, k: Tensor, v: Tensor) -> Buffers:
        """Return the buffers of the stages, large enough for the rank that gathers the most tokens."""
        size = max(self.reach) * k.shape[0] * (k.shape[2] // self.stages) * (k.shape[-1] + v.shape[-1]) * k.itemsize
        return stage_buffers(self.group, k.device, size)

    def start(self, k: Tensor, v: Tensor, some: slice, buffers: Buffers, turn: int) -> WholeGathering:
        """Start to gather the keys and values of some kv heads."""
        parts = (k[:, :, some], v[:, :, some])
        return WholeGathering(parts, self.split, self.rank, self.group, self.reach, buffers, turn)


@lru_cache(maxsize=256)
def _rule_of(
    rule: Selector | Hybrid, q_heads: tuple[int, int], heads: int, run: Run, split: SequenceSplit
) -> Selector | Hybrid:
    """Return a rule restricted to some of the `heads` q heads and to a run of queries."""
    return rule_of_run(rule_of_heads(rule, slice(*q_heads), heads), run, split)


@lru_cache(maxsize=256)
def _selects_on_device(rule: Selector | Hybrid, grid: BlockGrid, shape: tuple[int, ...], device: torch.device) -> bool:
    """Return whether kernels serve the selection. `select_blocks` would ask, and check the inputs, for every stage."""
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    return bool(grid.kv_blocks) and serves(
        torch.empty(1, device=device, dtype=torch.float32).expand(shape), grid, selector
    )


_select_on_device = on_host(select_on_device)
