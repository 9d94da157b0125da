# SPDX-License-Identifier: Apache-2.0
"""`sparse_attention`: exact softmax attention over the pairs that a layout shows."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dynaxx.arguments import typed
from dynaxx.derivatives import transforms_active
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.scale import softmax_scale
from dynaxx.kernels.sinks import add_sinks
from dynaxx.layout import BlockLayout, CuSeqlens, PackedLayout
from dynaxx.ops.autocast import follow_autocast
from dynaxx.ops.autograd import attend_with_gradients
from dynaxx.ops.checks import check_inputs, check_packed, check_sinks
from dynaxx.ops.dispatch import backend_for, load_backend, score_options
from dynaxx.ops.library import attention_forward, is_traced, layout_tensors


class SparseAttentionOutput(NamedTuple):
    """What attention with `return_lse=True` returns.

    Attributes:
        out: (batch, seqlen_q, q_heads, head_dim_v), q's dtype; packed (tokens, q_heads, head_dim_v).
        lse: (batch, q_heads, seqlen_q) fp32 (fp64 for fp64), natural log of the sum of exponentials of the visible
            scores, -inf where a query sees nothing; packed (q_heads, tokens).
    """

    out: Tensor
    lse: Tensor


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> SparseAttentionOutput: ...


@typed
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend over the blocks of `layout`, exactly. Differentiable.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); fp16, bf16, fp32 or fp64. Any strides.
            Under `torch.autocast` q, k and v are cast to its dtype, as `scaled_dot_product_attention` does.
            Packed, (tokens, q_heads, head_dim): sequences of any length behind one another.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v); q_heads must be a multiple of kv_heads.
        layout: of the same lengths; shared, or one per batch entry and per q head. Packed: from `packed_layout`,
            `select_packed_blocks` or `pack_layouts`.
        cu_seqlens_q, cu_seqlens_k: packed only, (num_seqs + 1,) cumulative lengths from 0, `cu_seqlens_k` as
            `cu_seqlens_q` by default. The layout knows its lengths; where these are given they must be the same. On a
            GPU and under a compiler their values are not read, only how many there are (DYNAXX_DEBUG=1 waits for the
            GPU and reads them).
        scale: softmax scale, default head_dim ** -0.5.
        softcap: c > 0 caps each score s to c * tanh(s / c), after the scale, as in Gemma 2.
        sinks: (q_heads,), a logit per head that joins each softmax's denominator and has no value, as in gpt-oss; not
            scaled, not capped, differentiable.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", or "reference", "cpu", "triton", "hopper".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v), or (out, lse); packed (tokens, q_heads, head_dim_v) and lse
        (q_heads, tokens). A query that sees nothing gives out = 0, lse = -inf; with sinks lse = its head's sink.

    Raises:
        ValueError, TypeError: inputs that do not fit together.
        UnsupportedInputError: no backend, or not the named one, can serve; with the reasons of each.
    """
    q, k, v = follow_autocast(q, k, v)
    packed = isinstance(layout, PackedLayout) and q.ndim == 3
    if packed or cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_packed(q, k, v, layout, cu_seqlens_q, cu_seqlens_k)
        q, k, v = q[None], k[None], v[None]
    scale = None if scale is None else softmax_scale(scale, q.shape[-1])
    softcap = None if softcap is None else float(softcap)
    if sinks is not None:
        check_sinks(sinks, q)
    out, lse = _attend(q, k, v, layout, scale, softcap, sinks, backend)
    if packed:
        out, lse = out[0], lse[0]
    return SparseAttentionOutput(out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Check, choose and call: the backend itself, or its registered op where something traces."""
    if is_traced(q):
        ATTENTION.check_name(backend)
        needs_grad = check_inputs(q, k, v, layout, softcap=softcap, values=False).needs_grad
        tensors, scale = layout_tensors(layout, q), q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = attention_forward(q, k, v, tensors, *layout.block_size, scale, softcap, backend, needs_grad)
        return (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    name, needs_grad = backend_for(q, k, v, layout, softcap, backend)
    if q.is_neg() or k.is_neg() or v.is_neg():  # kernels read memory, which a view of the negative shares
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sinks is not None:
        needs_grad |= sinks.requires_grad and torch.is_grad_enabled()
    if name == "reference" or not (needs_grad or transforms_active() or forward_ad._current_level >= 0):
        return load_backend(name).attention_forward(q, k, v, layout, scale, **score_options(softcap, sinks))
    return attend_with_gradients(q, k, v, sinks, layout, scale, softcap, name)
