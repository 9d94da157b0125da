# SPDX-License-Identifier: Apache-2.0
"""Biases by distance: one number per q head and distance of a query and a key, added to their score.

A table is (B, Hq, N + M - 1). Entry M - 1 + i - j belongs to query i and key j. Slopes are (B, Hq); they stand for the
table of minus the slope times the distance of the positions i + M - N and j.

Legend: B batch; Hq q heads; N queries, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def table_of(bias: Tensor | None, queries: int, keys: int) -> Tensor | None:
    """Return a bias as a table; None for None. Differentiable."""
    if bias is None or bias.ndim == 3:
        return bias
    return bias[..., None] * _slope_factors(bias, queries, keys)


def add_gradient(dbias: Tensor, sums: Tensor, queries: int, keys: int) -> None:
    """Add the gradient of a table, (B, Hq, N + M - 1), to that of a bias, which is a table or slopes."""
    dbias += sums if dbias.ndim == 3 else (sums * _slope_factors(sums, queries, keys)).sum(-1)


def _slope_factors(like: Tensor, queries: int, keys: int) -> Tensor:
    return -torch.arange(queries - 1, -keys, -1, dtype=like.dtype, device=like.device).abs()


def bias_of_pairs(bias: Tensor | None, queries: int) -> Tensor | None:
    """Return the bias of each pair, (B, Hq, N, M); None for None. Differentiable."""
    if bias is None:
        return None
    keys = bias.shape[-1] + 1 - queries
    return bias[..., _entries(queries, keys, bias.device)]


def sums_by_distance(pairs: Tensor) -> Tensor:
    """Return the sums of (B, Hq, N, M) over the pairs of each distance, (B, Hq, N + M - 1)."""
    queries, keys = pairs.shape[-2:]
    sums = pairs.new_zeros(*pairs.shape[:2], max(0, queries + keys - 1))
    return sums.index_add_(-1, _entries(queries, keys, pairs.device).flatten(), pairs.flatten(-2))


def _entries(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device) + (keys - 1)
