# SPDX-License-Identifier: Apache-2.0
"""`flash_attn_func` and `flash_attn_varlen_func` of flash-attn 2.8, on dynaxx's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.integrations.flash_attn.arguments import (
    arguments_named,
    block_size_of,
    check_deterministic,
    refuse,
    rule_of,
    softcap_of,
)
from dynaxx.layout import BlockLayout
from dynaxx.layout.packed import CuSeqlens, host_lengths
from dynaxx.ops import SparseAttentionOutput, sparse_attention
from dynaxx.ops.position_bias import Alibi
from dynaxx.patterns.packed import packed_layout


@typed
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn.flash_attn_func` does. Differentiable.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); fp16, bf16, fp32 or fp64, on a CPU or a GPU.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim).
        dropout_p: must be 0.0.
        softmax_scale: softmax scale, head_dim ** -0.5 by default.
        causal: hide keys after the query; queries are aligned to the last keys.
        window_size: (left, right), a pair or a tensor: keys visible besides the query's own; -1 is unlimited.
        softcap: cap on scores; 0.0 means none.
        alibi_slopes: (q_heads,) or (batch, q_heads), subtracted from scores times the distance of query and key.
            Gradients flow to slopes that require them; flash-attn has none.
        deterministic: compute gradients bitwise deterministically. On a GPU this needs
            `torch.use_deterministic_algorithms(True)`.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim), or (out, lse, None) with lse (batch, q_heads, seqlen_q) fp32. A query
        that sees no key has out = 0 and lse = -inf; flash-attn returns lse = inf.

    Raises:
        UnsupportedInputError: the call has dropout, or no backend supports the inputs.
        ValueError: the inputs do not fit together.
        TypeError: an argument has a wrong type.
    """
    refuse("flash_attn_func", dropout_p=dropout_p)
    check_deterministic(deterministic, q, k, v)
    _check_rank(q, k, v, 4, "(batch, seqlen, heads, head_dim)")
    rule = rule_of(causal, window_size)
    layout = rule.layout(q.shape[1], k.shape[1], causal=causal, block_size=block_size_of(q), device=q.device)
    out, lse = _attend(q, k, v, layout, softmax_scale, softcap, alibi_slopes)
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
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend as `flash_attn.flash_attn_varlen_func` does, over packed sequences. Differentiable.

    Args:
        q: (tokens_q, q_heads, head_dim).
        k: (tokens_k, kv_heads, head_dim).
        v: (tokens_k, kv_heads, head_dim).
        cu_seqlens_q: (num_seqs + 1,) cumulative lengths from 0. Lengths on a GPU are copied to the host once per call;
            host tensors and lists avoid the copy.
        cu_seqlens_k: (num_seqs + 1,) cumulative lengths of the keys.
        max_seqlen_q: at least the longest sequence of queries.
        max_seqlen_k: at least the longest sequence of keys.
        dropout_p: see `flash_attn_func`.
        softmax_scale: see `flash_attn_func`.
        causal: see `flash_attn_func`.
        window_size: see `flash_attn_func`.
        softcap: see `flash_attn_func`.
        alibi_slopes: (q_heads,), see `flash_attn_func`. Each sequence must have as many keys as queries.
        deterministic: see `flash_attn_func`.
        return_attn_probs: also return the log-sum-exp.
        block_table: must be None; use `flash_attn_with_kvcache` for paged caches.

    Returns:
        out (tokens_q, q_heads, head_dim), or (out, lse, None) with lse (q_heads, tokens_q) fp32.

    Raises:
        UnsupportedInputError: see `flash_attn_func`.
        ValueError: see `flash_attn_func`.
        TypeError: see `flash_attn_func`.
    """
    refuse("flash_attn_varlen_func", dropout_p=dropout_p, block_table=block_table)
    check_deterministic(deterministic, q, k, v)
    _check_rank(q, k, v, 3, "(tokens, heads, head_dim)")
    for side, ends, most, x in (("q", cu_seqlens_q, max_seqlen_q, q), ("k", cu_seqlens_k, max_seqlen_k, k)):
        lengths = host_lengths(f"cu_seqlens_{side}", ends)
        if lengths[-1] != len(x):
            raise ValueError(f"`cu_seqlens_{side}` must end at the {len(x)} tokens of {side}, got {lengths[-1]}")
        longest = max((b - a for a, b in itertools.pairwise(lengths)), default=0)
        if most < longest:
            raise ValueError(f"`max_seqlen_{side}` must be at least the longest sequence, {longest}, got {most}")
    rule = rule_of(causal, window_size)
    layout = packed_layout(
        rule, cu_seqlens_q, cu_seqlens_k, causal=causal, block_size=block_size_of(q), device=q.device
    )
    out, lse = _attend(q, k, v, layout, softmax_scale, softcap, alibi_slopes)
    return (out, lse, None) if return_attn_probs else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> SparseAttentionOutput:
    bias, cap = None if alibi_slopes is None else Alibi(alibi_slopes), softcap_of(softcap)
    with arguments_named(scale="softmax_scale", position_bias="alibi_slopes", slopes="alibi_slopes"):
        return sparse_attention(q, k, v, layout, scale=scale, softcap=cap, position_bias=bias, return_lse=True)


def _check_rank(q: Tensor, k: Tensor, v: Tensor, rank: int, shape: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != rank:
            raise ValueError(f"`{name}` must be {shape}, got {tuple(x.shape)}")
