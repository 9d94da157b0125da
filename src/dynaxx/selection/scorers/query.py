# SPDX-License-Identifier: Apache-2.0
"""Score blocks by the attention of a row's mean query to each of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.kernels.registry import QUERY_SCORES
from dynaxx.kernels.selection.contract import QueryScoresKernels, QueryScoresProblem
from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import (
    MEMORY_BUDGET,
    MeanQueryTiles,
    Scorer,
    ScoreRows,
    Sharpness,
    divisor_at_most,
    per_kv_head,
    pieces,
    scoring_kernels,
)
from dynaxx.selection.scorers.pooling import mean_tiles
from dynaxx.settings import Positive

PIECE_BYTES = 4 << 20  # bytes of logits at a time, which fit a core's cache
SMALLEST = -80.0  # negligible beside a best logit of 0, but not denormal after exp; a CPU takes 50 times as long then


@dataclass(frozen=True)
class MeanQuery(Scorer, kind="mean_query"):
    """The mean query of a q block against every key, summed over the keys of a kv block: the default.

    A block's score is the log of its keys' summed exponentials. Keys differ more than neighbouring queries do.
    Averaging only the queries lets a single key that draws all attention count with its own score. The method costs a
    share 1 / q_block of the attention map. It is inaccurate near the query, where rotary embeddings make the queries of
    a block differ; cover that region with a pattern such as `SlidingWindow` or `LocalBlocks`.

    Args:
        sharpness: factor on the scores. Queries spread their attention over more keys than their mean does.
        precision: "int8" permits scores of 8 bits. Every backend computes "full" ones, which are faster.
    """

    sharpness: Sharpness = 0.75
    precision: Literal["full", "int8"] = "full"

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        on_gpu = scoring_kernels(q) is not None and grid.kv_blocks > 0
        dtype = k.dtype if on_gpu else torch.float32
        queries = mean_tiles(q, grid.block_size[0], memory_budget // 4, scale * self.sharpness, dtype).vectors
        if on_gpu:
            kernels = query_kernels(k, grid)
            return lambda start, stop: kernels.query_scores(queries(start, stop), k, start, grid)
        return lambda start, stop: all_scores(queries(start, stop), k, start, grid, memory_budget // 2)

    @override
    def mean_query_tiles(self, q_block: int) -> MeanQueryTiles:
        return MeanQueryTiles(q_block, self.sharpness)

    @property
    @override
    def reads_places(self) -> bool:
        return True

    @override
    def prepare_in_place(
        self, q: Tensor, k: Tensor, places: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        kernels = query_kernels(k, grid)
        queries = mean_tiles(q, grid.block_size[0], memory_budget // 4, scale * self.sharpness, k.dtype).vectors
        return lambda start, stop: kernels.query_scores(queries(start, stop), k, start, grid, places=places)


def query_kernels(k: Tensor, grid: BlockGrid) -> QueryScoresKernels:
    """Return the fastest kernels on a GPU that score these keys.

    Raises:
        UnsupportedInputError: there are none; the error lists the reasons.
    """
    steps = [step * k.itemsize % 16 for step, size in zip(k.stride()[:3], k.shape, strict=False) if size > 1]
    aligned = k.stride(3) == 1 and not any(steps) and k.data_ptr() % 16 == 0
    return _query_kernels(QueryScoresProblem(k.device, k.dtype, k.shape[3], grid.block_size[1], aligned))


@lru_cache(maxsize=256)
def _query_kernels(problem: QueryScoresProblem) -> QueryScoresKernels:
    return QUERY_SCORES.kernels(QUERY_SCORES.resolve(problem))


def all_scores(
    queries: Tensor,
    k: Tensor,
    start: int,
    grid: BlockGrid,
    memory_budget: int,
    q_block: int | None = None,
) -> Tensor:
    """Return the log of the sum over each kv block's visible keys of exp(query . key).

    Args:
        queries: (B, Hq, R, D) fp32, one query per row of q blocks, times the softmax scale.
        k: (B, seqlen_k, Hk, D).
        start: index of the first row.
        grid: the grid of blocks.
        memory_budget: bytes of temporary memory.
        q_block: queries per row; the q block by default.

    Returns:
        (B, Hq, R, C) fp32. A row sees the keys up to its last query; blocks of which it sees no key get -inf.
    """
    (batch, heads, rows, _), kv_block = queries.shape, grid.block_size[1]
    ends = ends_of(start, rows, q_block or grid.block_size[0], grid, k.device)
    scores = queries.new_full((batch, heads, rows, grid.kv_blocks), -torch.inf)
    position = torch.arange(grid.kv_blocks * kv_block, device=k.device).unflatten(0, (-1, kv_block))
    for first, last in pieces(grid.kv_blocks, _block_bytes(queries, k, kv_block), min(memory_budget, PIECE_BYTES)):
        begin, stop = first * kv_block, last * kv_block
        # Rows before `above` see none of these keys; rows from `inside` on see all of them.
        above, inside = (int((ends <= edge).sum()) for edge in (begin, stop - 1))
        if above == rows:
            break
        keys = k[:, begin:stop].float().transpose(1, 2)
        if keys.shape[2] < stop - begin:
            keys = torch.nn.functional.pad(keys, (0, 0, 0, stop - begin - keys.shape[2]))
        hidden = position[first:last] >= ends[above:inside, None, None]
        scores[:, :, above:, first:last] = _sums(queries[:, :, above:], keys.unflatten(2, (-1, kv_block)), hidden)
    return scores


def ends_of(start: int, rows: int, q_block: int, grid: BlockGrid, device: torch.device) -> Tensor:
    """Return (rows,) the number of keys that each row of `q_block` queries from `start` sees; < 1 for none."""
    if not grid.causal:
        return torch.full((rows,), grid.seqlen_k, device=device, dtype=torch.int64)
    stands = torch.arange(start + 1, start + rows + 1, device=device) * q_block
    return (stands + grid.offset).clamp(max=grid.seqlen_k)


def _block_bytes(queries: Tensor, k: Tensor, kv_block: int) -> int:
    """Return the bytes for scoring one kv block: two copies of its keys, and its logits."""
    batch, heads, rows, dim = queries.shape
    return batch * kv_block * (12 * k.shape[2] * dim + 8 * heads * rows)


def _sums(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Return the log of the sum over each block's keys, (B, Hq, R, n).

    Args:
        queries: (B, Hq, R, D).
        keys: (B, Hk, n, kv_block, D) fp32.
        hidden: mask of keys that the first rows do not see.
    """
    logits = per_kv_head(queries, keys.flatten(2, 3).transpose(-1, -2)).unflatten(-1, keys.shape[2:4])
    logits[:, :, : len(hidden)].masked_fill_(hidden, -torch.inf)
    best = logits.amax(-1, keepdim=True)
    logits.sub_(best.clamp(min=torch.finfo(logits.dtype).min)).clamp_(min=SMALLEST)
    return logits.exp_().sum(-1).log_().add_(best[..., 0])


@dataclass(frozen=True)
class TileQueries(Scorer, kind="tile_queries"):
    """Score the mean query of each tile of a q block against every key. A block's estimate is the mean of its masses.

    `MeanQuery` has one tile per q block. Smaller tiles follow queries that differ within a block, and cost as many
    times as much as there are tiles in a q block.

    Args:
        tokens: queries per tile; the largest divisor of the q block up to this is used.
        sharpness: factor on the scores. Queries spread their attention over more keys than their mean does.
    """

    tokens: Positive = 16
    sharpness: Sharpness = 0.75

    @override
    def mean_query_tiles(self, q_block: int) -> MeanQueryTiles:
        return MeanQueryTiles(divisor_at_most(q_block, self.tokens), self.sharpness)

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        (q_block, kv_block), (batch, q_heads) = grid.block_size, (q.shape[0], q.shape[2])
        size = divisor_at_most(q_block, self.tokens)
        kernels = query_kernels(k, grid) if scoring_kernels(q) is not None and grid.kv_blocks else None
        dtype = torch.float32 if kernels is None else k.dtype
        queries = mean_tiles(q, size, memory_budget // 4, scale * self.sharpness, dtype)
        parts, position = q_block // size, torch.arange(grid.kv_blocks, device=k.device) * kv_block

        def mass(start: int, stop: int) -> Tensor:
            """Return (B, Hq, tiles, C): the share of each kv block in the attention of each tile; 0 without a key."""
            vectors, ends = queries.vectors(start, stop), ends_of(start, stop - start, size, grid, k.device)
            if kernels is None:
                scores = all_scores(vectors, k, start, grid, memory_budget // 4, size)
            else:
                scores = kernels.query_scores(vectors, k, start, grid, q_block=size)
            hidden = position >= ends[:, None]  # of these, kernels may leave any number
            return scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_((ends <= 0)[:, None], 0.0)

        def rows(start: int, stop: int) -> Tensor:
            found = torch.zeros(batch, q_heads, stop - start, grid.kv_blocks, device=k.device, dtype=torch.float32)
            row_bytes = 8 * parts * batch * q_heads * grid.kv_blocks
            for a, b in pieces(stop - start, row_bytes, memory_budget // 2):
                some = mass((start + a) * parts, min((start + b) * parts, queries.count))
                missing = (b - a) * parts - some.shape[2]
                found[:, :, a:b] = torch.nn.functional.pad(some, (0, 0, 0, missing)).unflatten(2, (-1, parts)).sum(3)
            return found.log_()

        return rows
