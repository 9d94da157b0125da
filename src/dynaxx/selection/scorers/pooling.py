# SPDX-License-Identifier: Apache-2.0
"""Score blocks by means and bounds of their keys."""

from __future__ import annotations

from collections.abc import Callable
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
    pieces,
    pooled,
    reduce_blocks,
    scoring_kernels,
    sum_groups,
)
from dynaxx.settings import Positive, Range, Share


@dataclass(frozen=True)
class TokenTiles:
    """Vectors that represent tiles of tokens."""

    size: int  # tokens per tile; divides the block
    count: int  # ceil(seqlen / size)
    vectors: Callable[[int, int], Tensor]  # (first, last + 1) -> (B, H, last - first, E) fp32


def tile_scores(
    queries: TokenTiles, keys: TokenTiles, grid: BlockGrid, heads: tuple[int, int], memory_budget: int
) -> ScoreRows:
    """Return a function that scores blocks by the attention of q tiles to key tiles.

    The logit of two tiles is the product of their vectors. A key tile is weighted by its number of keys, and is hidden
    from q tiles that end before it starts. A block's score is the log of its mass.

    Args:
        queries: tiles of the queries, their vectors times the softmax scale.
        keys: tiles of the keys.
        grid: the blocks that are scored.
        heads: (B, Hq).
        memory_budget: bytes for the scores of tiles and the vectors of keys.
    """
    return _TileScores(queries, keys, grid, heads, memory_budget).rows


class _TileScores:
    """Scores of blocks in torch, for a few q tiles at a time; arguments as in `tile_scores`."""

    def __init__(
        self, queries: TokenTiles, keys: TokenTiles, grid: BlockGrid, heads: tuple[int, int], memory_budget: int
    ) -> None:
        sample = keys.vectors(0, min(1, keys.count))
        self._queries, self._keys, self._grid, self._heads = queries, keys, grid, heads
        self._memory_budget, self._device = memory_budget, sample.device
        self._q_parts, self._k_parts = grid.block_size[0] // queries.size, grid.block_size[1] // keys.size
        # A few q tiles at a time: whole rows of blocks, or a power of two of tiles that divides one.
        row_bytes = 3 * 4 * heads[0] * heads[1] * max(1, keys.count)
        at_once = max(1, memory_budget // 2 // row_bytes)
        whole_rows = at_once >= self._q_parts
        self._at_once = at_once // self._q_parts * self._q_parts if whole_rows else 1 << at_once.bit_length() - 1
        self._key_bytes = 2 * 4 * sample[:, :, :1].numel()
        fits = keys.count * self._key_bytes <= memory_budget // 2
        self._all_keys = keys.vectors(0, keys.count) if fits else None
        self._position = torch.arange(keys.count, device=self._device) * keys.size
        self._weight = (grid.seqlen_k - self._position).clamp(max=keys.size).float().div(keys.size).log()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return (B, Hq, stop - start, C) scores of some rows of blocks."""
        mass = torch.zeros(*self._heads, stop - start, self._grid.kv_blocks, device=self._device, dtype=torch.float32)
        if not self._keys.count:
            return mass
        end = min(stop * self._q_parts, self._queries.count)
        for first in range(start * self._q_parts, end, self._at_once):
            last, row = min(first + self._at_once, end), first // self._q_parts - start
            if self._at_once < self._q_parts:
                mass[:, :, row] += self._shares(first, last).sum(2)
            else:
                some = sum_groups(self._shares(first, last), self._q_parts, -2)
                mass[:, :, row : row + some.shape[2]] = some
        return mass.log_()

    def _shares(self, first: int, last: int) -> Tensor:
        """Return (B, Hq, last - first, C) masses of the kv blocks for some q tiles; each tile's sum is 1 or 0."""
        logits = self._logits(self._queries.vectors(first, last))
        logits += self._weight
        if self._grid.causal:
            tiles = torch.arange(first + 1, last + 1, device=self._device)
            ends = tiles * self._queries.size - 1 + self._grid.offset
            logits.masked_fill_(self._position > ends[:, None], -torch.inf)
        logits -= logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
        logits.exp_()
        logits /= logits.sum(-1, keepdim=True).clamp(min=1.0)  # the sum is at least 1 if the row sees any key
        return sum_groups(logits, self._k_parts, -1)

    def _logits(self, queries: Tensor) -> Tensor:
        """Return the products of some q tiles with all key tiles."""
        if self._all_keys is not None:
            return per_kv_head(queries, self._all_keys.transpose(-1, -2))
        count = self._keys.count
        logits = torch.empty(*self._heads, queries.shape[2], count, device=queries.device, dtype=torch.float32)
        for a, b in pieces(count, self._key_bytes + 4 * logits[..., :1].numel(), self._memory_budget // 4):
            logits[..., a:b] = per_kv_head(queries, self._keys.vectors(a, b).transpose(-1, -2))
        return logits


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
