# SPDX-License-Identifier: Apache-2.0
"""`flash_attn_func` and `flash_attn_varlen_func` of flash-attn 2.8, on dynaxx's kernels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, number, typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import never_traced
from dynaxx.layout.packed import CuSeqlens, host_lengths
from dynaxx.ops import SparseAttentionOutput, sparse_attention
from dynaxx.ops.position_bias import Alibi
from dynaxx.patterns import Causal, Full, Pattern, SlidingWindow
from dynaxx.patterns.packed import packed_layout


def rule_of(causal: bool, window_size: Sequence[int] | Tensor) -> Pattern:
    """Return the rule that `causal` and `window_size` describe, bottom-right aligned as in flash-attn from 2.1 on.

    Raises:
        ValueError: `window_size` is not (left, right), each >= -1.
    """
    left, right = check_window(window_size)
    if causal:
        return Causal() if left == -1 else SlidingWindow((left, 0))
    return Full() if (left, right) == (-1, -1) else SlidingWindow((left, right))


def check_window(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """Return (left, right). flash-attn also takes a list and a tensor.

    Raises:
        ValueError: not two whole numbers >= -1.
    """
    given = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"`window_size` must be (left, right), got {window_size!r}")
    try:
        left, right = (as_integer("window_size", side) for side in given)
    except TypeError:
        left = right = -2
    if min(left, right) < -1:
        raise ValueError(f"`window_size` must be two integers >= -1, -1 for unlimited, got {window_size!r}")
    return left, right


def softcap_of(softcap: float) -> float | None:
    """Return dynaxx's softcap, which is None for FlashAttention's 0.0.

    Raises:
        ValueError: `softcap` is below 0 or not finite.
    """
    softcap = number("softcap", softcap)
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"`softcap` must be finite and >= 0.0 (0.0 disables it), got {softcap}")
    return None if softcap == 0 else softcap


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Replace the names of arguments in the errors of the functions that are called within, by those of the caller.

    Args:
        names: the caller's names by the functions' own.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if not error.args or not isinstance(error.args[0], str) or isinstance(error, UnsupportedInputError):
            raise
        error.args = (re.sub(r"`(\w+)`", lambda found: f"`{names.get(found[1], found[1])}`", error.args[0]),)
        raise


def refuse(
    name: str, *, dropout_p: float = 0.0, alibi_slopes: Tensor | None = None, block_table: Tensor | None = None
) -> None:
    """Refuse arguments of FlashAttention that dynaxx does not compute.

    Raises:
        UnsupportedInputError: with the reasons.
    """
    reasons = []
    if dropout_p:
        reasons.append(f"`dropout_p` must be 0.0, got {dropout_p}: dropout is not supported")
    if alibi_slopes is not None:
        reasons.append("`alibi_slopes` must be None: decoding adds no bias; use flash_attn_func over the keys")
    if block_table is not None:
        reasons.append("`block_table` must be None: use flash_attn_with_kvcache for a paged cache")
    if reasons:
        raise UnsupportedInputError(name, {"dynaxx": reasons})


def check_deterministic(deterministic: bool, *tensors: Tensor) -> None:
    """Check that gradients are deterministic, which on a GPU depends on a setting of torch.

    Raises:
        ValueError: gradients on a GPU without `torch.use_deterministic_algorithms(True)`.
    """
    needs = deterministic and torch.is_grad_enabled() and any(x.requires_grad and x.is_cuda for x in tensors)
    if needs and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("`deterministic` needs torch.use_deterministic_algorithms(True) on a GPU")


def block_size_of(q: Tensor) -> int:
    """Return the best number of tokens per block on q's device."""
    return 64 if q.device.type == "cpu" else 128


@never_traced
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


@never_traced
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
