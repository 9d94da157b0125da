# SPDX-License-Identifier: Apache-2.0
"""Score blocks by sums over anti-diagonals of the attention map."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import MEMORY_BUDGET, Scorer, ScoreRows, divisor_at_most
from dynaxx.selection.scorers.tiles import TokenTiles, tile_scores
from dynaxx.settings import Range


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
