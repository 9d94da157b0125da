# SPDX-License-Identifier: Apache-2.0
"""Score blocks by the attention of the mean queries of a row's tiles to each key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import (
    MEMORY_BUDGET,
    MeanQueryTiles,
    Scorer,
    ScoreRows,
    Sharpness,
    divisor_at_most,
    pieces,
    scoring_kernels,
)
from dynaxx.selection.scorers.pooling import mean_tiles
from dynaxx.selection.scorers.query import all_scores, ends_of, query_kernels
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
