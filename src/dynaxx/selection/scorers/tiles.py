# SPDX-License-Identifier: Apache-2.0
"""Scores at a finer grain than blocks: a softmax over tiles of keys per tile of queries, summed up per block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import ScoreRows, per_kv_head, pieces, sum_groups


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
