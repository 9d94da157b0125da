"""Cheap estimates of how much attention each q block pays to each kv block, from pooled queries and keys.

A scorer returns logits: their softmax over the visible kv blocks estimates the share of attention mass. They come a few
rows of q blocks at a time, so nothing of seqlen_q x seqlen_k, and not even all (q block, kv block) pairs, need exist.

B batch, Hq / Hk heads, R rows of q blocks, C kv blocks, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid

ScoreRows = Callable[[int, int], Tensor]  # (first row, last row + 1) -> (B, Hq, R, C) fp32 logits


class Scorer(ABC):
    """A rule that scores blocks."""

    @abstractmethod
    def prepare(self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float) -> ScoreRows:
        """Summarise q and k once; return a function that scores some rows of q blocks. Causality is the caller's."""


@dataclass(frozen=True)
class MeanPool(Scorer):
    """Mean-pooled queries against mean-pooled keys (MoBA, FlexPrefill, and many others).

    Args:
        pool: tokens per mean, or None for one mean per block. A smaller pool sees more of a block: its estimates are
            summed over the block's keys and averaged over its queries.
    """

    pool: int | None = None

    def __post_init__(self) -> None:
        if self.pool is not None and self.pool < 1:
            raise ValueError(f"`pool` must be >= 1 tokens, got {self.pool}")

    def prepare(self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float) -> ScoreRows:
        q_parts, k_parts = (1 if self.pool is None else max(1, size // self.pool) for size in grid.block_size)
        queries = _pooled(q, grid.block_size[0] // q_parts) * scale  # (B, Hq, q_blocks * q_parts, D)
        keys = _per_q_head(_pooled(k, grid.block_size[1] // k_parts), q.shape[2])
        position = torch.arange(keys.shape[2], device=k.device) * (grid.block_size[1] // k_parts)

        def rows(start: int, stop: int) -> Tensor:
            some = queries[:, :, start * q_parts : stop * q_parts]
            logits = some @ keys.transpose(-1, -2)
            if q_parts == k_parts == 1:
                return logits
            if grid.causal:  # a pool of keys that starts after the pool of queries ends is hidden from it
                last = torch.arange(start * q_parts + 1, start * q_parts + some.shape[2] + 1, device=q.device)
                last = last * (grid.block_size[0] // q_parts) - 1 + grid.offset
                logits = logits.masked_fill(position > last[:, None], -torch.inf)
            share = _safe_softmax(logits)
            share = _sum_groups(_sum_groups(share, k_parts, -1), q_parts, -2)
            return share.log()

        return rows


@dataclass(frozen=True)
class MinMax(Scorer):
    """The mean query's score bounded from each block's smallest and largest keys (Quest).

    Args:
        bound: 1.0 is the upper bound itself, 0.0 the score of the mean key, and between them their mixture: the bound
            alone overrates blocks whose keys differ much, the mean overlooks single keys that matter.
    """

    bound: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.bound <= 1:
            raise ValueError(f"`bound` must be from 0.0 to 1.0, got {self.bound}")

    def prepare(self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float) -> ScoreRows:
        queries = _pooled(q, grid.block_size[0]) * scale
        summary = lambda x: _per_q_head(x.transpose(1, 2), q.shape[2])
        smallest = summary(_blocks(k.float(), grid.block_size[1], pad=torch.inf).amin(2))  # (B, Hq, C, D)
        largest = summary(_blocks(k.float(), grid.block_size[1], pad=-torch.inf).amax(2))
        if self.bound < 1:
            mean = _per_q_head(_pooled(k, grid.block_size[1]), q.shape[2])
            smallest, largest = (mean + self.bound * (extreme - mean) for extreme in (smallest, largest))

        def rows(start: int, stop: int) -> Tensor:
            some = queries[:, :, start:stop]
            return some.clamp(min=0) @ largest.transpose(-1, -2) + some.clamp(max=0) @ smallest.transpose(-1, -2)

        return rows


@dataclass(frozen=True)
class LastQueryProbe(Scorer):
    """Vertical and slash lines seen by the last queries (MInference): the attention of `queries` queries over all keys,
    summed by key and by distance; a block's score is the mass of the lines that cross it."""

    queries: int = 64

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"`queries` must be >= 1, got {self.queries}")

    def prepare(self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float) -> ScoreRows:
        (q_block, kv_block), seqlen_k = grid.block_size, k.shape[1]
        probes = q[:, -self.queries :].float().transpose(1, 2) * scale  # (B, Hq, P, D)
        logits = probes @ _per_q_head(k.float().transpose(1, 2), q.shape[2]).transpose(-1, -2)
        q_pos = torch.arange(seqlen_k - probes.shape[2], seqlen_k, device=q.device)
        distance = q_pos[:, None] - torch.arange(seqlen_k, device=q.device)
        share = _safe_softmax(logits.masked_fill(distance < 0, -torch.inf) if grid.causal else logits)
        vertical = _sum_groups(share.mean(2), kv_block, -1)  # (B, Hq, C)
        reach = max(grid.seqlen_q, seqlen_k) + q_block + kv_block  # distances -reach .. reach, for cumulative sums
        by_distance = share.new_zeros(*share.shape[:2], 2 * reach + 1)
        place = (distance + reach).flatten().expand(*share.shape[:2], -1)
        by_distance.scatter_add_(-1, place, share.flatten(2) / probes.shape[2])
        cumulative = torch.nn.functional.pad(by_distance.cumsum(-1), (1, 0))
        cols = torch.arange(grid.kv_blocks, device=q.device)

        def rows(start: int, stop: int) -> Tensor:
            row = torch.arange(start, stop, device=q.device)[:, None]
            first = row * q_block + grid.offset - cols * kv_block + reach  # of the block's first pair
            lo, hi = (first - kv_block + 1).clamp(min=0), (first + q_block).clamp(max=2 * reach + 1)
            slash = cumulative[..., hi.flatten()] - cumulative[..., lo.flatten()]
            return (slash.unflatten(-1, first.shape).clamp(min=0) + vertical[:, :, None]).log()

        return rows


def _blocks(x: Tensor, size: int, pad: float) -> Tensor:
    """(B, N, H, D) -> (B, ceil(N / size), size, H, D), the tail filled with `pad`."""
    missing = -x.shape[1] % size
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing), value=pad) if missing else x
    return x.unflatten(1, (-1, size))


def _pooled(x: Tensor, size: int) -> Tensor:
    """(B, N, H, D) -> (B, H, ceil(N / size), D) fp32 means over `size` tokens, the last over what is left."""
    if size == 1:
        return x.float().transpose(1, 2)
    sums = _blocks(x, size, pad=0.0).sum(2, dtype=torch.float32)
    counts = torch.full((sums.shape[1], 1, 1), float(size), device=x.device)
    counts[-1:] = size - (-x.shape[1] % size)
    return (sums / counts).transpose(1, 2)


def _per_q_head(x: Tensor, q_heads: int) -> Tensor:
    return x.repeat_interleave(q_heads // x.shape[1], dim=1)


def _safe_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dim; a row of -inf gives zeros."""
    return logits.softmax(-1).nan_to_num(0.0)


def _sum_groups(x: Tensor, size: int, dim: int) -> Tensor:
    """Sum every `size` neighbours along `dim` (negative); the last group over what is left."""
    missing = -x.shape[dim] % size
    x = torch.nn.functional.pad(x, (0, 0) * (-1 - dim) + (0, missing)) if missing else x
    return x.unflatten(dim, (-1, size)).sum(dim)
