# SPDX-License-Identifier: Apache-2.0
"""Score blocks by clusters of keys and by the number of each cluster's keys in a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import MEMORY_BUDGET, Scorer, ScoreRows, log_share, per_kv_head, pieces
from dynaxx.settings import Range, Seed

KEYS_PER_CLUSTER = 32  # random keys per cluster that place the centroids
FEW_RANKS = 32  # up to this many ranks are found one by one, more by sorting

Clusters = Annotated[int, Range(1, 1 << 16, stored=4096, tries=(1, 4, 8, 40))]
Iterations = Annotated[int, Range(1, 100, tries=(1, 3))]


@dataclass(frozen=True)
class KeyClusters(Scorer, kind="key_clusters"):
    """The queries' nearest k-means clusters of keys, and the number of their keys in a block (RetrievalAttention).

    This is the inverted-file index of nearest-neighbour search (for attention: RetrievalAttention, Squeezed Attention,
    ClusterKV). A few steps of k-means place `clusters` centroids per kv head, starting from one eighth outlying and
    seven eighths random keys. Every key belongs to its nearest centroid. A query attends to the `nearest` clusters with
    the largest dot product, and treats each of their keys as if it were the centroid. A block's estimate is the
    attention of its queries to its keys. The centroids depend on all keys, so those for early queries include later
    keys.

    Args:
        clusters: centroids per kv head; with fewer keys, each key is a centroid.
        nearest: number of clusters that each query attends to.
        iterations: steps of Lloyd's algorithm.
        seed: seed of the starting keys.
    """

    clusters: Clusters = 128
    nearest: Clusters = 32
    iterations: Iterations = 4
    seed: Seed = 0

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        (batch, _, q_heads, dim), q_block = q.shape, grid.block_size[0]
        centroids = self._centroids(k, memory_budget // 2)  # (B, Hk, K, D)
        members = _members(k, centroids, grid, memory_budget // 2)  # (B, Hk, K, C): keys of each cluster per block
        log_size = members.sum(-1).log()  # (B, Hk, K), -inf for an empty cluster
        log_size = log_size.repeat_interleave(q_heads // k.shape[2], dim=1)[:, :, None]
        nearest = min(self.nearest, centroids.shape[2])

        def rows(start: int, stop: int) -> Tensor:
            scores = torch.zeros(batch, q_heads, stop - start, grid.kv_blocks, device=q.device, dtype=torch.float32)
            row_bytes = q_block * batch * q_heads * (4 * dim + 16 * centroids.shape[2] + 12 * nearest)
            for a, b in pieces(stop - start if grid.kv_blocks else 0, row_bytes, memory_budget):
                some = q[:, (start + a) * q_block : (start + b) * q_block].transpose(1, 2).float() * scale
                logits = per_kv_head(some, centroids.transpose(-1, -2))  # (B, Hq, n, K)
                cutoff = logits.topk(nearest, dim=-1).values[..., -1:]
                lse = (logits + log_size).logsumexp(-1, keepdim=True)
                logits = logits.masked_fill_(logits < cutoff, -torch.inf).sub_(lse).exp_()  # attention to one key
                scores[:, :, a:b] = per_kv_head(_sum_rows(logits, q_block), members)
            return log_share(scores)

        return rows

    def _centroids(self, k: Tensor, memory_budget: int) -> Tensor:
        """Return the centroids, (B, Hk, K, D) fp32."""
        tokens = k.shape[1]
        count = min(self.clusters, max(1, tokens))
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(self.seed), device="cpu")
        sample = k[:, order[: count * KEYS_PER_CLUSTER].to(k.device)].transpose(1, 2).float()  # (B, Hk, n, D)
        if not tokens:
            return sample.new_zeros(*sample.shape[:2], 1, sample.shape[-1])
        # Start from outlying keys such as attention sinks, around which no cluster would form, and from random keys.
        apart = (sample - sample.mean(2, keepdim=True)).square().sum(-1).topk(count // 8, dim=-1).indices
        first = torch.zeros_like(sample[..., 0]).scatter_(-1, apart, 1.0).argsort(dim=-1, descending=True, stable=True)
        centroids = sample.gather(2, first[:, :, :count, None].expand(-1, -1, -1, sample.shape[-1]))
        for _ in range(self.iterations):
            sums, sizes = torch.zeros_like(centroids), torch.zeros_like(centroids[..., :1])
            for a, b in pieces(sample.shape[2], 12 * centroids[..., 0].numel(), memory_budget):
                some = sample[:, :, a:b]
                of = _nearest(some, centroids)[:, :, None]  # (B, Hk, 1, n)
                # A product with zeros and ones rather than index_add_: deterministic on every device.
                one_hot = (torch.arange(count, device=k.device)[:, None] == of).float()
                sums += one_hot @ some
                sizes += one_hot.sum(-1, keepdim=True)
            centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
        return centroids


@dataclass(frozen=True)
class ClusterRanks(Scorer):
    """Score blocks by how well they represent a cluster of keys, for every query alike. Used by `ClusterGlobals`.

    Each cluster ranks the blocks by the number of its keys that they hold; among equals the earlier block comes first.
    A block's logit is minus its best rank over the clusters, so 0 means that it holds the most keys of some cluster.
    Blocks beyond the first `ranks` of every cluster have -inf.

    Args:
        index: the clusters.
        ranks: number of blocks that each cluster ranks.
    """

    index: KeyClusters
    ranks: int

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        group_size = q.shape[2] // k.shape[2]
        members = _members(k, self.index._centroids(k, memory_budget // 2), grid, memory_budget // 2)  # (B, Hk, K, C)
        scores = k.new_full((*members.shape[:2], grid.kv_blocks), -torch.inf, dtype=torch.float32)
        if self.ranks > FEW_RANKS:
            held, block = members.sort(dim=-1, descending=True, stable=True)
            rank = -torch.arange(grid.kv_blocks, dtype=torch.float32, device=k.device)
            found = torch.where((held > 0) & (rank > -min(self.ranks, grid.kv_blocks)), rank, -torch.inf)
            scores.scatter_reduce_(-1, block.flatten(2), found.flatten(2), "amax")
        for nth in range(min(self.ranks, grid.kv_blocks) if self.ranks <= FEW_RANKS else 0):
            count, block = members.max(-1)
            found = k.new_tensor(-float(nth), dtype=torch.float32).where(count > 0, -torch.inf)
            scores.scatter_reduce_(-1, block, found, "amax")
            members.scatter_(-1, block[..., None], 0.0)
        scores = scores.repeat_interleave(group_size, dim=1)[:, :, None]  # (B, Hq, 1, C)
        return lambda start, stop: scores.repeat(1, 1, stop - start, 1)


def _nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    """Return (B, Hk, n) int64, the index of each key's nearest centroid."""
    half_norm = centroids.square().sum(-1)[:, :, None] / 2
    return (keys @ centroids.transpose(-1, -2)).sub_(half_norm).argmax(-1)


def _members(k: Tensor, centroids: Tensor, grid: BlockGrid, memory_budget: int) -> Tensor:
    """Return (B, Hk, K, C) fp32, the number of each cluster's keys in each kv block."""
    batch, tokens, heads, dim = k.shape
    count, kv_block = centroids.shape[2], grid.block_size[1]
    members = torch.zeros(batch, heads, count * grid.kv_blocks, device=k.device, dtype=torch.float32)
    for a, b in pieces(tokens, batch * heads * (4 * dim + 4 * count + 32), memory_budget):
        of = _nearest(k[:, a:b].transpose(1, 2).float(), centroids)
        place = of * grid.kv_blocks + torch.arange(a, b, device=k.device) // kv_block
        members.scatter_add_(-1, place, torch.ones((), device=k.device, dtype=torch.float32).expand_as(place))
    return members.view(batch, heads, count, grid.kv_blocks)


def _sum_rows(x: Tensor, size: int) -> Tensor:
    """Sum every `size` rows: (B, H, n, K) -> (B, H, ceil(n / size), K)."""
    whole = x.shape[2] // size * size
    sums = x[:, :, :whole].unflatten(2, (-1, size)).sum(3)
    return sums if whole == x.shape[2] else torch.cat([sums, x[:, :, whole:].sum(2, keepdim=True)], dim=2)
