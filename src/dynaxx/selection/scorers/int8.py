"""Blocks in two stages from 8-bit keys: all of them coarsely, the better part again finely."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import MEMORY_BUDGET, Scorer, ScoreRows, divisor_at_most, pieces, pooled
from dynaxx.selection.scorers.pooling import mean_tiles
from dynaxx.selection.scorers.tiles import Tiles, tile_scores


@dataclass(frozen=True)
class Int8Pool(Scorer):
    """Mean-pooled queries and keys in 8 bits (SageAttention's and SpargeAttention's quantised scores), in two stages.

    The first stage scores every block from means of `pool` tokens, the second scores the best share `survivors` of a
    row's blocks again from means of `fine` tokens; together they keep the mass that the first stage gave them. Each
    mean is stored as 8-bit integers and one scale, a quarter of the memory of fp32.

    Args:
        pool: tokens per mean in the first stage (the largest divisor of the block up to it).
        fine: tokens per mean in the second, likewise.
        survivors: share of the kv blocks that reaches the second stage.
    """

    pool: int = 16
    fine: int = 4
    survivors: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.fine <= self.pool:
            raise ValueError(f"`pool` and `fine` must be 1 <= fine <= pool tokens, got {self.pool} and {self.fine}")
        if not 0 <= self.survivors <= 1:
            raise ValueError(f"`survivors` must be from 0.0 to 1.0, got {self.survivors}")

    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        share, heads = memory_budget // 4, (q.shape[0], q.shape[2])
        q_size, k_size = (divisor_at_most(size, self.pool) for size in grid.block_size)
        queries = mean_tiles(q, q_size, share, scale)
        coarse_keys = _quantized(k, k_size, share)
        rounded = Tiles(q_size, queries.count, lambda a, b: _round(queries.vectors(a, b)).values(0, b - a), q.dtype)
        coarse = tile_scores(
            rounded,
            Tiles(k_size, coarse_keys.numbers.shape[2], coarse_keys.values, k.dtype),
            grid,
            heads,
            memory_budget // 2,
            hold_keys=False,
        )
        survivors = math.ceil(self.survivors * grid.kv_blocks)
        if not survivors:
            return coarse
        q_fine, k_fine = (divisor_at_most(size, self.fine) for size in grid.block_size)
        again = _FineScores(q, _quantized(k, k_fine, share), grid, (q_fine, k_fine), scale)
        row_bytes = heads[0] * heads[1] * survivors * grid.block_size[1] // k_fine
        row_bytes *= 5 * q.shape[-1] + 12 * grid.block_size[0] // q_fine

        def rows(start: int, stop: int) -> Tensor:
            scores = coarse(start, stop)
            for a, b in pieces(stop - start, row_bytes, memory_budget // 2):
                best, where = scores[:, :, a:b].topk(survivors, dim=-1)
                fine = again.shares(start + a, start + b, where).log_()
                fine = fine.add_(best.logsumexp(-1, keepdim=True))
                scores[:, :, a:b].scatter_(-1, where, torch.where(best > -torch.inf, fine, best))
            return scores

        return rows


class _Quantized(NamedTuple):
    """Vectors of 8-bit integers times a scale each."""

    numbers: Tensor  # (B, H, T, D) int8
    scales: Tensor  # (B, H, T, 1) fp32

    def values(self, first: int, last: int) -> Tensor:
        return self.numbers[:, :, first:last].float().mul_(self.scales[:, :, first:last])


def _round(x: Tensor) -> _Quantized:
    scales = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny * 128) / 127
    return _Quantized((x / scales).round_().to(torch.int8), scales)


def _quantized(x: Tensor, size: int, memory_budget: int) -> _Quantized:
    """Means of `size` tokens in 8 bits, made a piece at a time."""
    batch, tokens, heads, dim = x.shape
    count = -(-tokens // size)
    numbers = torch.empty(batch, heads, count, dim, dtype=torch.int8, device=x.device)
    scales = torch.empty(batch, heads, count, 1, device=x.device)
    for a, b in pieces(count, 4 * batch * heads * dim * (4 + size), memory_budget):
        numbers[:, :, a:b], scales[:, :, a:b] = _round(pooled(x[:, a * size : b * size], size, memory_budget))
    return _Quantized(numbers, scales)


@dataclass(frozen=True)
class _FineScores:
    """The second stage: fine tiles of some blocks of each row."""

    q: Tensor
    keys: _Quantized
    grid: BlockGrid
    tile: tuple[int, int]
    scale: float

    def shares(self, start: int, stop: int, where: Tensor) -> Tensor:
        """(B, Hq, R, S): how each row's attention to its blocks `where` (B, Hq, R, S) divides among them."""
        grid, (q_size, k_size), (q_block, kv_block) = self.grid, self.tile, self.grid.block_size
        queries = pooled(self.q[:, start * q_block : stop * q_block], q_size) * self.scale
        q_parts, k_parts = q_block // q_size, kv_block // k_size
        missing = (stop - start) * q_parts - queries.shape[2]
        queries = _round(torch.nn.functional.pad(queries, (0, 0, 0, missing))).values(0, (stop - start) * q_parts)
        # Key tiles of the chosen blocks; those past the end stand in for themselves and are hidden below.
        tile = where[..., None] * k_parts + torch.arange(k_parts, device=where.device)  # (B, Hq, R, S, k_parts)
        batch = torch.arange(where.shape[0], device=where.device)[:, None, None, None]
        head = torch.arange(where.shape[1], device=where.device)[:, None, None]
        head = head // (where.shape[1] // self.keys.numbers.shape[1])
        at = (batch, head, tile.flatten(3).clamp(max=self.keys.numbers.shape[2] - 1))
        keys = self.keys.numbers[at].float().mul_(self.keys.scales[at])  # (B, Hq, R, S * k_parts, D)
        logits = queries.unflatten(2, (-1, q_parts)) @ keys.transpose(-1, -2)  # (B, Hq, R, q_parts, S * k_parts)
        first = tile.flatten(3)[:, :, :, None] * k_size
        ends = torch.arange(start * q_parts + 1, stop * q_parts + 1, device=where.device) * q_size - 1 + grid.offset
        hidden = first >= grid.seqlen_k
        if grid.causal:
            hidden = hidden | (first > ends.view(-1, q_parts, 1))
        share = logits.masked_fill_(hidden, -torch.inf).softmax(-1).nan_to_num_(0.0)
        if missing:
            share[:, :, -1, q_parts - missing :] = 0.0
        mass = share.sum(3).unflatten(-1, (-1, k_parts)).sum(-1)
        return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
