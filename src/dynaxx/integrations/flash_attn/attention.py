# SPDX-License-Identifier: Apache-2.0
"""`flash_attn_func` and `flash_attn_varlen_func` of flash-attn 2.8, on dynaxx's kernels."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.integrations.flash_attn.arguments import (
    block_size_of,
    check_deterministic,
    refuse,
    rule_of,
    softcap_of,
)
from dynaxx.layout.packed import CuSeqlens, host_lengths
from dynaxx.ops import sparse_attention
from dynaxx.patterns.packed import packed_layout


@typed
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn.flash_attn_func` does. Differentiable.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); fp16, bf16, fp32 or fp64, on a CPU or a GPU.
        k, v: (batch, seqlen_k, kv_heads, head_dim).
        dropout_p: must be 0.0.
        softmax_scale: default head_dim ** -0.5.
        causal: hide keys after the query; queries are aligned to the last keys.
        window_size: (left, right), keys visible besides the query's own; -1 is unlimited.
        softcap: cap of the scores; 0.0 is none.
        alibi_slopes: must be None.
        deterministic: gradients that are bitwise the same every time. On a GPU this needs
            `torch.use_deterministic_algorithms(True)`.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim), or (out, lse, None): lse (batch, q_heads, seqlen_q) fp32. A query that
        sees nothing gives out = 0 and lse = -inf; flash-attn gives lse = inf there.

    Raises:
        UnsupportedInputError: dropout, ALiBi, or inputs that no backend serves; with the reasons.
        ValueError, TypeError: inputs that do not fit together.
    """
    refuse("flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    check_deterministic(deterministic, q, k, v)
    _check_rank(q, k, v, 4, "(batch, seqlen, heads, head_dim)")
    rule = rule_of(causal, window_size)
    layout = rule.layout(q.shape[1], k.shape[1], causal=causal, block_size=block_size_of(q), device=q.device)
    out, lse = sparse_attention(q, k, v, layout, scale=softmax_scale, softcap=softcap_of(softcap), return_lse=True)
    return (out, lse, None) if return_attn_probs else out


@typed
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend as `flash_attn.flash_attn_varlen_func` does, over sequences behind one another. Differentiable.

    Args:
        q: (tokens_q, q_heads, head_dim).
        k, v: (tokens_k, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) cumulative lengths from 0. On a GPU they are read back, once per
            call: pass host tensors or lists where the lengths are known there.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as `flash_attn_func`.
        return_attn_probs: also return the log-sum-exp.
        block_table: must be None; `flash_attn_with_kvcache` reads paged caches.

    Returns:
        out (tokens_q, q_heads, head_dim), or (out, lse, None): lse (q_heads, tokens_q) fp32.

    Raises:
        UnsupportedInputError, ValueError, TypeError: as `flash_attn_func`.
    """
    refuse("flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    check_deterministic(deterministic, q, k, v)
    _check_rank(q, k, v, 3, "(tokens, heads, head_dim)")
    for side, ends, most in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        lengths = host_lengths(f"cu_seqlens_{side}", ends)
        longest = max((b - a for a, b in itertools.pairwise(lengths)), default=0)
        if most < longest:
            raise ValueError(f"`max_seqlen_{side}` must be at least the longest sequence, {longest}, got {most}")
    rule = rule_of(causal, window_size)
    layout = packed_layout(
        rule, cu_seqlens_q, cu_seqlens_k, causal=causal, block_size=block_size_of(q), device=q.device
    )
    out, lse = sparse_attention(q, k, v, layout, scale=softmax_scale, softcap=softcap_of(softcap), return_lse=True)
    return (out, lse, None) if return_attn_probs else out


def _check_rank(q: Tensor, k: Tensor, v: Tensor, rank: int, shape: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != rank:
            raise ValueError(f"`{name}` must be {shape}, got {tuple(x.shape)}")
