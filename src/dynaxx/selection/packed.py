# SPDX-License-Identifier: Apache-2.0
"""Choose blocks for a packed batch: select per sequence, then join the layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import CuSeqlens, PackedLayout, pack_layouts
from dynaxx.layout.host import lasting
from dynaxx.layout.packed import host_lengths
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.packed import packed_layout
from dynaxx.selection.base import Hybrid, Selector


@typed
@torch.no_grad()
@lasting
def select_packed_blocks(
    q: Tensor,
    k: Tensor,
    rule: Pattern | Selector | Hybrid,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    memory_budget: int | None = None,
) -> PackedLayout:
    """Build the layout of a rule for packed queries and keys. Each sequence chooses as it would alone.

    Args:
        q: (tokens, q_heads, head_dim).
        k: (tokens, kv_heads, head_dim).
        rule: a pattern, a selector, or `pattern | selector`; budgets and positions count per sequence.
        cu_seqlens_q: (num_seqs + 1,) cumulative lengths from 0. Lengths on a GPU are read back, which synchronizes.
        cu_seqlens_k: (num_seqs + 1,) cumulative lengths of the keys; `cu_seqlens_q` by default.
        causal: hide keys after the query.
        block_size: tokens per block, or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5.
        memory_budget: bytes of temporary memory, as in `select_blocks`.

    Returns:
        A layout for `sparse_attention`. Chosen blocks count from the start of their sequence. If that is not a multiple
        of the block size, a chosen block covers up to four blocks of the packed axis.

    Raises:
        ValueError: shapes or lengths do not fit.
    """
    ends_q = host_lengths("cu_seqlens_q", cu_seqlens_q)
    ends_k = ends_q if cu_seqlens_k is None else host_lengths("cu_seqlens_k", cu_seqlens_k)
    if q.ndim != 3 or k.ndim != 3 or (len(q), len(k)) != (ends_q[-1], ends_k[-1]) or len(ends_q) != len(ends_k):
        raise ValueError(
            f"`q` and `k` must be (tokens, heads, head_dim) of {ends_q[-1]} and {ends_k[-1]} tokens in as many "
            f"sequences, got {tuple(q.shape)} and {tuple(k.shape)}, {len(ends_q) - 1} and {len(ends_k) - 1} sequences"
        )
    if isinstance(rule, Pattern):
        return packed_layout(rule, ends_q, ends_k, causal=causal, block_size=block_size, device=q.device)
    options: dict[str, Any] = dict(causal=causal, block_size=block_size, scale=scale, memory_budget=memory_budget)
    layouts = []
    for s in range(len(ends_q) - 1):
        one_q, one_k = q[None, ends_q[s] : ends_q[s + 1]], k[None, ends_k[s] : ends_k[s + 1]]
        shown = min(one_q.shape[1], one_k.shape[1]) > 0
        layouts.append(rule.select(one_q, one_k, **options) if shown else None)
    return pack_layouts(layouts, ends_q, ends_k, block_size=block_size)
