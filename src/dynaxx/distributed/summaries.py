# SPDX-License-Identifier: Apache-2.0
"""Gathered summaries of the keys of all ranks, which let selectors score blocks without gathering the keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from dynaxx.distributed.gather import WholeGathering
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout import BlockGrid
from dynaxx.selection import Hybrid, MeanPool, MeanQuery, MinMax, Selector
from dynaxx.selection.choice import ChoiceSettings
from dynaxx.selection.scorers.base import (
    GPU_MEMORY_BUDGET,
    MEMORY_BUDGET,
    Scorer,
    ScoreRows,
    pooled,
)
from dynaxx.selection.scorers.pooling import mean_tiles, summary_scores
from dynaxx.selection.scorers.query import query_kernels


def has_summaries(selector: Selector) -> bool:
    """Return whether a selector scores kv blocks by one summary per block."""
    scorer = selector.scorer
    return isinstance(scorer, MeanPool | MinMax) and scorer.pool is None


@dataclass(frozen=True, eq=False)
class GatheredScorer(Scorer):
    """A `MeanPool` or `MinMax` that receives block summaries instead of keys.

    Args:
        low: (batch, kv_heads, kv_blocks, head_dim) fp32, vectors that multiply the negative part of a query.
        high: vectors that multiply the positive part of a query; `low` itself if there is one vector per block.
    """

    low: Tensor
    high: Tensor

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        queries = mean_tiles(q, grid.block_size[0], memory_budget // 4, scale)
        high = self.high[:, :, : grid.kv_blocks]
        low = high if self.low is self.high else self.low[:, :, : grid.kv_blocks]
        return summary_scores(queries, low, high)


@dataclass(frozen=True)
class ByMeanQueries(Scorer):
    """A `MeanQuery` that receives mean queries, (batch, rows, q_heads, head_dim), in place of queries; on a GPU."""

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        kernels, means = query_kernels(k, grid), q.transpose(1, 2)
        return lambda start, stop: kernels.query_scores(means[:, :, start:stop], k, start, grid)


@lru_cache(maxsize=256)
def by_mean_queries(selector: Selector) -> Selector:
    """Return a selector that receives mean queries in place of queries."""
    return replace(selector, scorer=ByMeanQueries())  # type: ignore[type-var]


def mean_queries(q: Tensor, selector: Selector, q_block: int, scale: float) -> Tensor | None:
    """Return the mean queries that `by_mean_queries` receives, (batch, rows, q_heads, head_dim); None if it cannot."""
    scorer = selector.scorer
    if not isinstance(scorer, MeanQuery):
        return None
    tiles = mean_tiles(q, q_block, GPU_MEMORY_BUDGET, scale * scorer.sharpness, q.dtype)
    return tiles.vectors(0, tiles.count).transpose(1, 2)


def with_summaries(
    rule: Any, k: Tensor, split: SequenceSplit, rank: int, group: ProcessGroup, size: int
) -> tuple[Any, Tensor]:
    """Return the rule with a `GatheredScorer`, and an uninitialised tensor with the shape of the whole keys.

    Args:
        rule: a selector or hybrid for which `has_summaries` is true.
        k: (batch, own tokens, kv_heads, head_dim).
        split: which rank owns which tokens.
        rank: this rank.
        group: the ranks.
        size: tokens per kv block.
    """
    selector = rule.selector if isinstance(rule, Hybrid) else rule
    parts = _own_summaries(selector.scorer, k, size)
    blocks = SequenceSplit(-(-split.seqlen // size), split.chunk // size, split.owners, split.ranks)
    gathered = WholeGathering(tuple(x.transpose(1, 2) for x in parts), blocks, rank, group).wait()
    vectors = [x.transpose(1, 2).contiguous() for x in gathered]
    scorer = GatheredScorer(vectors[0], vectors[-1])
    own = _ByTorch(selector, scorer)
    keys = k.new_empty(1).expand(k.shape[0], split.seqlen, *k.shape[2:])
    return (Hybrid(rule.pattern, own) if isinstance(rule, Hybrid) else own), keys


def _own_summaries(scorer: Any, k: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return the scorer's summaries of own blocks, each (batch, kv_heads, own blocks, head_dim) fp32."""
    if isinstance(scorer, MeanPool):
        return (pooled(k, size),)
    return scorer.extremes(k, size, MEMORY_BUDGET)


@dataclass(frozen=True, eq=False)
class _ByTorch(Selector):
    """A selector whose scorer holds tensors of one call. It selects in torch, so no kernel launch is cached for it."""

    selector: Selector
    scorer: Scorer
    budget: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", getattr(self.selector, self.selector.budget_field))
        object.__setattr__(self, "per", self.selector.per)
        object.__setattr__(self, "only_ranks", self.selector.only_ranks)
        object.__setattr__(self, "budget_field", "budget")

    def choose(self, scores: Tensor, optional: Tensor, visible: Tensor) -> Tensor:
        return self.selector.choose(scores, optional, visible)

    def choice(self, q_heads: int) -> ChoiceSettings | None:
        return None
