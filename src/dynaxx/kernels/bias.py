# SPDX-License-Identifier: Apache-2.0
"""Biases by distance: one number per q head and distance of a query and a key, added to their score.

A bias is (B, Hq, N + M - 1). Entry M - 1 + i - j belongs to query i and key j.

Legend: B batch; Hq q heads; N queries, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
