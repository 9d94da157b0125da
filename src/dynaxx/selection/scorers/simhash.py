# SPDX-License-Identifier: Apache-2.0
"""Score blocks by how often their keys share a hash bucket with the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.layout.cache import LayoutCache
from dynaxx.selection.scorers.base import (
    MEMORY_BUDGET,
    Scorer,
    ScoreRows,
    per_kv_head,
    pieces,
    pooled,
)
from dynaxx.settings import Range, Seed

PIECE = 512  # tokens per partial mean


@dataclass(frozen=True)
class SimHash(Scorer, kind="sim_hash"):
    """The number of (query, key) pairs of a block that share a bucket of random projections (Reformer, MagicPIG).

    This is SimHash (Charikar 2002). Each table hashes a vector to the signs of `bits` random projections. A query and a
    key at angle a share a bucket of a table with probability (1 - a / pi) ** bits, which rises steeply for vectors of
    similar direction. A block's score is log(n + 0.5), where n counts the triples (query, key, table) that share a
    bucket. The score ranks blocks well, but is a rough estimate of attention mass. The mean key is subtracted from all
    keys first. This does not change the softmax, and spreads the keys over the buckets.

    Args:
        tables: number of independent hashes.
        bits: projections per hash; a table has 2 ** bits buckets.
        seed: seed of the projections.
    """

    tables: Annotated[int, Range(1, 1024, stored=256, tries=(1, 4))] = 16
    bits: Annotated[int, Range(1, 12, tries=(1, 5))] = 6
    seed: Seed = 0

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        planes = _planes(k.shape[-1], self.tables * self.bits, self.seed, k.device)
        center = _mean_token(k)
        q_block, kv_block = grid.block_size
        of_keys = self._histograms(k, kv_block, planes, center, memory_budget // 2).transpose(-1, -2)
        no_center = torch.zeros((), device=q.device, dtype=torch.float32)

        def rows(start: int, stop: int) -> Tensor:
            some = q[:, start * q_block : stop * q_block]
            of_queries = self._histograms(some, q_block, planes, no_center, memory_budget // 2)
            return pairs(of_queries, of_keys).add_(0.5).log_()

        return rows

    def _histograms(self, x: Tensor, size: int, planes: Tensor, center: Tensor, memory_budget: int) -> Tensor:
        """Count the tokens of each block per bucket: (B, N, H, D) -> (B, H, ceil(N / size), tables * 2 ** bits)."""
        batch, tokens, heads, dim = x.shape
        blocks, width = -(-tokens // size), self.tables << self.bits
        table = torch.arange(self.tables, device=x.device) << self.bits
        place = 2.0 ** torch.arange(self.bits, dtype=torch.float32, device=x.device)
        out = torch.zeros(batch, heads, blocks * width, device=x.device, dtype=torch.float32)
        token_bytes = batch * heads * (8 * dim + self.tables * (8 * self.bits + 40))
        for first, last in pieces(tokens, token_bytes, memory_budget):
            signs = ((x[:, first:last].float() - center) @ planes > 0).unflatten(-1, (self.tables, self.bits))
            bucket = ((signs.float() @ place).long() + table).transpose(1, 2)  # (B, H, n, tables)
            block = torch.arange(first, last, device=x.device) // size
            bucket = (bucket + block[:, None] * width).flatten(2)
            out.scatter_add_(-1, bucket, torch.ones((), device=x.device, dtype=torch.float32).expand_as(bucket))
        return out.view(batch, heads, blocks, width)


def pairs(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Multiply counts to numbers of pairs: (B, Hq, M, E) x (B, Hk, E, T) -> (B, Hq, M, T) fp32.

    Counts are whole numbers up to 128, the largest block. bf16 represents them exactly, and a GPU adds the products in
    fp32.
    """
    if not of_queries.is_cuda or not of_queries.numel() or not of_keys.numel():
        return per_kv_head(of_queries, of_keys)
    (batch, q_heads, rows, width), kv_heads = of_queries.shape, of_keys.shape[1]
    grouped = of_queries.bfloat16().reshape(batch * kv_heads, q_heads // kv_heads * rows, width)
    found = torch.bmm(grouped, of_keys.bfloat16().flatten(0, 1), out_dtype=torch.float32)
    return found.view(batch, q_heads, rows, of_keys.shape[-1])


@LayoutCache
def _planes(head_dim: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Return random projections, (head_dim, count) fp32, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(head_dim, count, generator=generator, dtype=torch.float32, device="cpu").to(device)


def _mean_token(x: Tensor) -> Tensor:
    """Return the mean token, (B, 1, H, D) fp32.

    The pieces do not depend on the memory budget, because a different rounding could flip the sign of a projection.
    """
    tokens = torch.full((-(-x.shape[1] // PIECE), 1), float(PIECE), device=x.device, dtype=torch.float32)
    tokens[-1:] = (x.shape[1] - 1) % PIECE + 1
    return (pooled(x, PIECE) * tokens).sum(2)[:, None] / max(1, x.shape[1])
