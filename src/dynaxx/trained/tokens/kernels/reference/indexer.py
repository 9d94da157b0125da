# SPDX-License-Identifier: Apache-2.0
"""The indexer of DeepSeek-V3.2 (DeepSeek Sparse Attention), defined: a score of each key for each query, and its best.

Sequences are packed. T queries, M keys, Hi heads of the indexer of width Di, n slots.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.kernels.rounding import to_fp8, to_int8
from dynaxx.layout.host import without_autocast
from dynaxx.trained.tokens.spans import TokenSpans, best_of

if TYPE_CHECKING:
    from dynaxx.trained.tokens.kernels.contract import IndexerProblem

__all__ = ["index_scores", "index_tokens", "to_fp8", "to_int8", "unsupported_reasons", "visible_keys"]


def unsupported_reasons(problem: IndexerProblem) -> list[str]:
    """Return no reasons: the definition serves everything, in memory of queries x keys."""
    return []


@without_autocast
def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return (T, M): sum over heads h of weights[t, h] * relu(q[t, h] . k[m]), in fp32 at least. Differentiable.

    Args:
        q: (T, Hi, Di).
        k: (M, Di), one head.
        weights: (T, Hi), scales included.
    """
    dtype = torch.float32 if q.itemsize == 1 else torch.promote_types(q.dtype, torch.float32)
    products = torch.einsum("thd,md->htm", q.to(dtype), k.to(dtype)).relu()
    return torch.einsum("htm,th->tm", products, weights.to(dtype))


def visible_keys(spans: TokenSpans, device: torch.device) -> Tensor:
    """Return (T, M) bool: keys of the query's own sequence, at or before it."""
    key = torch.arange(spans.ends_k[-1], device=device)
    first, position = spans.first_key.to(device)[:, None], spans.position.to(device)[:, None]
    return (key >= first) & (key <= first + position)


def index_tokens(
    q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, spans: TokenSpans, slots: int
) -> Tensor:
    """Return the best blocks of each query, (T, 1, slots) int32, ascending, -1 behind.

    A block's score is the best of its keys that the query may see; without one it is never chosen. Of equal scores the
    first block wins, and NaN ranks first. `k_scale` (M,) multiplies the scores of a key: that of keys in 8 bits.
    """
    scores = index_scores(q, k, weights)
    if k_scale is not None:
        scores = scores * k_scale.to(scores.dtype)
    scores = scores.masked_fill(~visible_keys(spans, q.device), -torch.inf)
    rows = torch.full((q.shape[0], 1, slots), -1, dtype=torch.int32, device=q.device)
    for (a, b), (c, d) in zip(pairwise(spans.ends_q), pairwise(spans.ends_k), strict=True):
        blocks = -(-(d - c) // spans.block_size)
        padding = blocks * spans.block_size - (d - c)
        own = torch.nn.functional.pad(scores[a:b, c:d], (0, padding), value=-torch.inf)
        by_block = own.unflatten(1, (blocks, spans.block_size)).amax(2) if blocks else own
        seen = spans.position[a:b].to(q.device) // spans.block_size + 1
        rows[a:b, 0] = best_of(by_block, seen, slots)
    return rows
