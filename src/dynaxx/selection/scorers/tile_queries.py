# SPDX-License-Identifier: Apache-2.0
"""Score blocks by the attention of the mean queries of a row's tiles to each key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.kernels.selection.cpu import block_scores
from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import (
    MEMORY_BUDGET,
    MeanQueryTiles,
    Scorer,
    ScoreRows,
    Sharpness,
    divisor_at_most,
    scoring_kernels,
)
from dynaxx.selection.scorers.pooling import mean_tiles
from dynaxx.selection.scorers.tiles import TokenTiles, tile_scores
from dynaxx.settings import Positive


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
        size = divisor_at_most(grid.block_size[0], self.tokens)
        on_gpu = scoring_kernels(q) is not None
        queries = mean_tiles(q, size, memory_budget // 4, scale * self.sharpness, k.dtype if on_gpu else torch.float32)
        if not on_gpu and grid.kv_blocks and block_scores.serves_scores(queries.vectors(0, 1), k):
            return _in_core(queries, k, grid)
        keys = TokenTiles(1, k.shape[1], lambda first, last: k[:, first:last].float().transpose(1, 2), k.dtype)
        return tile_scores(queries, keys, grid, (q.shape[0], q.shape[2]), memory_budget)


def _in_core(queries: TokenTiles, k: Tensor, grid: BlockGrid) -> ScoreRows:
    """Return the function of `tile_scores` for tiles of queries and single keys, computed by the core."""
    parts = grid.block_size[0] // queries.size

    def rows(start: int, stop: int) -> Tensor:
        first, last = start * parts, min(stop * parts, queries.count)
        ends = torch.full((last - first,), grid.seqlen_k, dtype=torch.int64, device="cpu")
        if grid.causal:
            ends = (torch.arange(first + 1, last + 1, device="cpu") * queries.size + grid.offset).clamp(
                0, grid.seqlen_k
            )
        mass = block_scores.block_scores(queries.vectors(first, last), k, ends, grid.block_size[1]).softmax(-1)
        mass.masked_fill_((ends == 0)[:, None], 0.0)  # tiles that see no key
        missing = (stop - start) * parts - mass.shape[2]
        if missing:
            mass = torch.nn.functional.pad(mass, (0, 0, 0, missing))
        return mass.unflatten(2, (-1, parts)).sum(3).log_()

    return rows
