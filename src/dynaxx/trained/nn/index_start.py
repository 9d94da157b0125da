# SPDX-License-Identifier: Apache-2.0
"""Initial weights of an indexer, taken from the heads of the attention that it is to predict.

An indexer with random weights learns in a few steps which tokens matter on average, but not to find one token far back:
few queries look for one. The heads that do so are there already, so the indexer starts as some of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

FEWEST = 16  # columns of a kv head that are worth taking
WEIGHT = 0.5  # of each head
RIDGE = 0.05  # share of the mean square of hidden states; keeps weights small


class IndexerWeights(Protocol):
    """An `Indexer`, whose weights are set."""

    heads: int
    dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    k_norm: nn.LayerNorm
    weight_proj: nn.Linear


@torch.no_grad()
def start_as_attention(
    indexer: IndexerWeights, q_proj: nn.Linear, k_proj: nn.Linear, heads: tuple[int, int, int], x: Tensor
) -> None:
    """Set an indexer's weights to those of some heads of attention.

    The first columns, which turn with positions, are those of kv head 0. Columns behind them are the slowest rotary
    pairs of other kv heads, because they match tokens at any distance. Weights of heads are close to a constant on x.

    Args:
        indexer: the indexer.
        q_proj: attention's projection to queries; its bias is left out.
        k_proj: attention's projection to keys; its bias is left out.
        heads: q heads, kv heads and head_dim.
        x: (..., hidden_size), hidden states as attention gets them, of a few hundred tokens or more.
    """
    q_heads, kv_heads, head_dim = heads
    x = x.detach().reshape(-1, x.shape[-1]).to(indexer.k_proj.weight.device).float()
    if len(x) < 2:
        raise ValueError(f"`x` must have at least 2 tokens, got {len(x)}")
    of_q = q_proj.weight.float().unflatten(0, (q_heads, head_dim))
    of_k = k_proj.weight.float().unflatten(0, (kv_heads, head_dim))
    queries = torch.zeros(indexer.heads, indexer.dim, x.shape[1], device=x.device, dtype=torch.float32)
    keys = indexer.k_proj.weight.float().clone()
    places = _places(indexer.dim, kv_heads, head_dim)
    for kv_head, (start, columns) in enumerate(places):
        keys[start : start + len(columns)] = of_k[kv_head, columns]
    for head in range(indexer.heads):
        kv_head, own = head % len(places), head // len(places)
        start, columns = places[kv_head]
        if own < q_heads // kv_heads:
            queries[head, start : start + len(columns)] = of_q[kv_head * (q_heads // kv_heads) + own, columns]
        else:  # more heads than attention has
            queries[head] = indexer.q_proj.weight.float().unflatten(0, (indexer.heads, indexer.dim))[head]
    products = x.T @ x
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    weights = WEIGHT * torch.linalg.solve(products, x.sum(0))
    indexer.q_proj.weight.copy_(queries.flatten(0, 1))
    indexer.k_proj.weight.copy_(keys)
    indexer.k_norm.weight.copy_((x @ keys.T).std(0))
    indexer.k_norm.bias.zero_()
    indexer.weight_proj.weight.copy_(weights.expand(indexer.heads, -1))


def _places(dim: int, kv_heads: int, head_dim: int) -> list[tuple[int, list[int]]]:
    """Return, for the first kv heads, where their columns begin in an indexer's key, and which columns those are."""
    half, turning = head_dim // 2, min(head_dim, dim) // 2 * 2
    fastest = [*range(turning // 2), *range(half, half + turning // 2)]
    rest = dim - turning
    others = min(kv_heads - 1, rest // FEWEST)
    size = min(half, rest // others // 2) if others else 0
    slowest = [*range(half - size, half), *range(head_dim - size, head_dim)]
    return [(0, fastest), *((turning + 2 * size * i, slowest) for i in range(others))]
