# SPDX-License-Identifier: Apache-2.0
"""Score blocks by means and bounds of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import (
    MEMORY_BUDGET,
    Scorer,
    ScoreRows,
    divisor_at_most,
    per_kv_head,
    pooled,
    reduce_blocks,
    scoring_kernels,
)
from dynaxx.selection.scorers.tiles import TokenTiles, tile_scores
from dynaxx.settings import Positive, Range, Share


@dataclass(frozen=True)
class MeanPool(Scorer, kind="mean_pool"):
    """Mean-pooled queries against mean-pooled keys (MoBA, FlexPrefill, and many others).

    Args:
        pool: tokens per mean (the largest divisor of the block up to this), or None for one mean per block. Estimates
            of smaller pools are finer; they are summed over the block's keys and averaged over its queries.
    """

    pool: Positive | None = None

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        q_size, k_size = (size if self.pool is None else divisor_at_most(size, self.pool) for size in grid.block_size)
        queries = mean_tiles(q, q_size, memory_budget // 4, scale)
        keys = mean_tiles(k, k_size, memory_budget // 4)
        if (q_size, k_size) != grid.block_size:
            return tile_scores(queries, keys, grid, (q.shape[0], q.shape[2]), memory_budget // 2)
        means = keys.vectors(0, keys.count)
        return summary_scores(queries, means, means)


def summary_scores(queries: TokenTiles, low: Tensor, high: Tensor) -> ScoreRows:
    """Multiply negative parts of queries with `low`, positive ones with `high`, each (B, Hk, kv blocks, D)."""
    low_columns, high_columns = low.transpose(-1, -2), high.transpose(-1, -2)
    if low is high:
        return lambda start, stop: per_kv_head(queries.vectors(start, stop), low_columns)

    def rows(start: int, stop: int) -> Tensor:
        some = queries.vectors(start, stop)
        return per_kv_head(some.clamp(min=0), high_columns).add_(per_kv_head(some.clamp(max=0), low_columns))

    return rows


def mean_tiles(
    x: Tensor, size: int, memory_budget: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> TokenTiles:
    """Return the means of every `size` tokens, times `scale`, as tiles with vectors of `dtype`."""

    def vectors(first: int, last: int) -> Tensor:
        some = x[:, first * size : last * size]
        kernels = scoring_kernels(x)
        if size > 1 and kernels is not None:
            return kernels.pool_blocks(some, size, "mean", scale, dtype)
        means = pooled(some, size, memory_budget)
        return (means if scale == 1.0 else means * scale).to(dtype)

    return TokenTiles(size, -(-x.shape[1] // size), vectors)


@dataclass(frozen=True)
class MinMax(Scorer, kind="min_max"):
    """Bound the mean query's score by the elementwise minima and maxima of each block's keys (Quest).

    Args:
        bound: 1.0 scores by the upper bound, 0.0 by the mean key, values between by their mixture. The bound overrates
            blocks whose keys differ much; the mean overlooks single keys that matter.
        pool: keys per bound (the largest divisor of the block up to this), or None for one bound per block. Bounds of
            fewer keys are tighter; a block's score is the log of the sum of their exponentials.
    """

    bound: Share = 1.0
    pool: Positive | None = None

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        kv_block = grid.block_size[1]
        k_size = kv_block if self.pool is None else divisor_at_most(kv_block, self.pool)
        queries = mean_tiles(q, grid.block_size[0], memory_budget // 4, scale)
        smallest, largest = self.extremes(k, k_size, memory_budget // 4)
        if k_size != kv_block:
            signed = TokenTiles(queries.size, queries.count, lambda a, b: _by_sign(queries.vectors(a, b)))
            bounds = torch.cat([largest, smallest], dim=-1)
            keys = TokenTiles(k_size, bounds.shape[2], lambda a, b: bounds[:, :, a:b])
            return tile_scores(signed, keys, grid, (q.shape[0], q.shape[2]), memory_budget // 2)
        return summary_scores(queries, smallest, largest)

    def extremes(self, k: Tensor, k_size: int, memory_budget: int) -> tuple[Tensor, Tensor]:
        """Return the minimum and maximum of every `k_size` keys, mixed with their mean, each (B, Hk, T, D) fp32."""
        smallest = reduce_blocks(k, k_size, torch.amin, memory_budget)
        largest = reduce_blocks(k, k_size, torch.amax, memory_budget)
        if self.bound < 1:
            mean = pooled(k, k_size, memory_budget)
            for extreme in (smallest, largest):
                extreme.sub_(mean).mul_(self.bound).add_(mean)
        return smallest, largest


def _by_sign(x: Tensor) -> Tensor:
    """Split a vector into its positive and negative parts: (..., D) -> (..., 2 D)."""
    return torch.cat([x.clamp(min=0), x.clamp(max=0)], dim=-1)


@dataclass(frozen=True)
class AntiDiagonal(Scorer, kind="anti_diagonal"):
    """A softmax over `stride` x `stride` tiles, each by the mean score of its anti-diagonal (XAttention).

    The map is cut into tiles of S x S pairs, S = `stride`. The logit of tile (i, j) is the mean over its anti-diagonal,
    the S pairs of query S i + S - 1 - s and key S j + s for s = 0 .. S - 1. The anti-diagonal touches every query and
    every key of the tile once, and crosses every vertical and slash line. A softmax normalizes each row of tiles over
    the tiles that start no later than the row ends (over all tiles if not causal). A block's estimate is the sum over
    its tiles. The method costs a share 1 / S of the full map. The last token is repeated past a sequence's end.

    Args:
        stride: tokens per tile; the largest divisor of both block sizes up to this is used.
    """

    stride: Annotated[int, Range(1, tries=(1, 4, 16, 50))] = 16

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        size = divisor_at_most(min(grid.block_size), self.stride)
        count = lambda x: -(-x.shape[1] // size)
        queries = TokenTiles(size, count(q), partial(_reversed_tiles, q, size, scale / size))
        keys = TokenTiles(size, count(k), partial(_flat_tiles, k, size))
        return tile_scores(queries, keys, grid, (q.shape[0], q.shape[2]), memory_budget)


def _flat_tiles(x: Tensor, size: int, first: int, last: int) -> Tensor:
    """Return the tokens of each tile side by side, (B, H, last - first, size * D) fp32."""
    return _tiles(x, size, first, last).permute(0, 3, 1, 2, 4).flatten(3).float()


def _reversed_tiles(x: Tensor, size: int, scale: float, first: int, last: int) -> Tensor:
    """Return the tokens of each tile side by side in reverse order, times `scale`."""
    return _tiles(x, size, first, last).flip(2).permute(0, 3, 1, 2, 4).flatten(3).float() * scale


def _tiles(x: Tensor, size: int, first: int, last: int) -> Tensor:
    """Return tiles of tokens, (B, last - first, size, H, D)."""
    some = x[:, first * size : last * size]
    missing = (last - first) * size - some.shape[1]
    if missing:
        some = torch.cat([some, x[:, -1:].expand(-1, missing, -1, -1)], dim=1)
    return some.unflatten(1, (last - first, size))
