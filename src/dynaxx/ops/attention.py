# SPDX-License-Identifier: Apache-2.0
"""`sparse_attention`: exact softmax attention over the pairs that a layout shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dynaxx.arguments import number, typed
from dynaxx.derivatives import refuse_compiled_transforms, refuse_transforms, transforms_active, untransformed
from dynaxx.kernels.registry import ATTENTION
from dynaxx.kernels.scale import softmax_scale
from dynaxx.kernels.sinks import add_sinks
from dynaxx.layout import BlockLayout, CuSeqlens, PackedLayout
from dynaxx.layout.host import lasting_copy, never_traced
from dynaxx.ops.autograd import attend_with_gradients
from dynaxx.ops.checks import check_inputs, check_packed, check_sinks, follow_autocast
from dynaxx.ops.dispatch import backend_for, has_gradient, in_larger_blocks, score_options
from dynaxx.ops.flops import is_counting
from dynaxx.ops.library import NO_PATTERN, attention_forward, is_traced, layout_tensors
from dynaxx.ops.position_bias import PositionBias, bias_by_distance


class SparseAttentionOutput(NamedTuple):
    """Result of an attention call with `return_lse=True`.

    Attributes:
        out: (batch, seqlen_q, q_heads, head_dim_v), q's dtype; packed (tokens, q_heads, head_dim_v).
        lse: (batch, q_heads, seqlen_q) fp32 (fp64 for fp64), natural log of the sum of exponentials of the visible
            scores, -inf for a query that sees nothing; packed (q_heads, tokens).
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
    position_bias: PositionBias | None = None,
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
    position_bias: PositionBias | None = None,
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
    position_bias: PositionBias | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend over the blocks of `layout`, exactly. Differentiable.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); fp16, bf16, fp32 or fp64, any strides. Packed inputs are
            (tokens, q_heads, head_dim), with sequences of any length one after another. Under `torch.autocast`, q, k
            and v are cast to its dtype, as in `scaled_dot_product_attention`.
        k: (batch, seqlen_k, kv_heads, head_dim); q_heads must be a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        layout: a layout for the same lengths, shared or one per batch entry and per q head. Packed inputs need a layout
            from `packed_layout`, `select_packed_blocks` or `pack_layouts`.
        cu_seqlens_q: packed inputs only: (num_seqs + 1,) cumulative lengths from 0. Optional, because the layout knows
            its lengths; if given, they must match. On a GPU and under a compiler only their number is checked, unless
            DYNAXX_DEBUG=1 is set, which waits for the GPU to read the values.
        cu_seqlens_k: packed inputs only: cumulative lengths of the keys; defaults to `cu_seqlens_q`.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: c > 0 caps each scaled score s to c * tanh(s / c), as in Gemma 2.
        sinks: (q_heads,), one logit per head that is added to each softmax's denominator and has no value, as in
            gpt-oss. Sinks are neither scaled nor capped, and are differentiable.
        position_bias: a bias on the scaled and capped scores by the distance of query and key, `Alibi` or `T5Bias`;
            differentiable.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", "reference", "cpu", "triton" or "hopper".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v), or (out, lse); packed (tokens, q_heads, head_dim_v) and lse
        (q_heads, tokens). A query that sees nothing has out = 0 and lse = -inf; with sinks, lse is its head's sink.

    Raises:
        ValueError, TypeError: the inputs do not match each other.
        UnsupportedInputError: no backend, or not the named one, can serve the call; lists the reasons of each.
    """
    q, k, v = follow_autocast(q, k, v)
    packed = isinstance(layout, PackedLayout) and q.ndim == 3
    if packed or cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_packed(q, k, v, layout, cu_seqlens_q, cu_seqlens_k)
        q, k, v = q[None], k[None], v[None]
    scale = None if scale is None else softmax_scale(scale, q.shape[-1])
    softcap = None if softcap is None else number("softcap", softcap)
    if sinks is not None:
        check_sinks(sinks, q)
    out, lse = _attend(q, k, v, layout, scale, softcap, sinks, position_bias, backend)
    if packed:
        out, lse = out[0], lse[0]
    return SparseAttentionOutput(out, lse) if return_lse else out


@never_traced
@typed
def column_sums(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    position_bias: PositionBias | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sum the attention weights that each key gets from all queries, without holding the weights.

    The sum over queries is the gradient of values of one number each, if every output has the gradient 1.

    Args:
        q: queries, as for `sparse_attention`, packed or not.
        k: keys, as for `sparse_attention`.
        layout: as for `sparse_attention`.
        scale: as for `sparse_attention`.
        softcap: as for `sparse_attention`.
        sinks: as for `sparse_attention`; their weights are not returned.
        position_bias: as for `sparse_attention`.
        backend: "auto" or a backend's name.

    Returns:
        (batch, q_heads, seqlen_k) fp32, fp64 for fp64; packed (q_heads, tokens). No gradient flows through the sums.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_attention`.
    """
    refuse_transforms("`column_sums`", q, k, fix="call it outside the transformed function")
    for name, x in (("q", q), ("k", k)):
        if x.ndim not in (3, 4):
            raise ValueError(f"`{name}` must be (batch, seqlen, heads, head_dim) or packed, got {tuple(x.shape)}")
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[-2] // max(1, k.shape[-2])
    q, k = lasting_copy(q.detach().to(wide)), lasting_copy(k.detach().to(wide).repeat_interleave(max(1, groups), -2))
    sinks = lasting_copy(sinks)
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        v = k.new_zeros(*k.shape[:-1], 1, requires_grad=True)
        options: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "position_bias": position_bias}
        out = sparse_attention(q, k, v, layout, scale=scale, backend=backend, **options)
        (sums,) = torch.autograd.grad(out, v, torch.ones_like(out))
    return sums[..., 0].transpose(-2, -1).contiguous()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: PositionBias | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Check the inputs, choose a backend, and call it directly, or through its registered op if something traces."""
    if is_traced(q, k, v):
        if torch.compiler.is_compiling():
            refuse_compiled_transforms("`sparse_attention`")
        else:
            is_counting()
        ATTENTION.check_name(backend)
        needs_grad = check_inputs(q, k, v, layout, softcap=softcap, values=False).needs_grad
        bias = bias_by_distance(position_bias, q, k, layout)
        needs_grad |= has_gradient(bias)
        with untransformed():  # torch.jit.trace makes sizes tensors, whose powers have the default dtype
            scale = q.shape[-1] ** -0.5 if scale is None else scale
        tensors = layout_tensors(layout, q)
        settings = (scale, softcap, backend, needs_grad, bias, has_gradient(bias), NO_PATTERN)
        out, lse = attention_forward(q, k, v, tensors, *layout.block_size, *settings)
        return (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    bias = bias_by_distance(position_bias, q, k, layout)
    name, needs_grad = backend_for(q, k, v, layout, softcap, backend, bias)
    if name == "hopper" and backend == "auto":
        layout = in_larger_blocks(layout)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sinks is not None:
        needs_grad |= has_gradient(sinks)
    if name == "reference" or not (needs_grad or transforms_active() or forward_ad._current_level >= 0):
        return ATTENTION.kernels(name).attention_forward(q, k, v, layout, scale, **score_options(softcap, sinks, bias))
    return attend_with_gradients(q, k, v, sinks, bias, layout, scale, softcap, name)


@typed
def merge_states(states: Sequence[tuple[Tensor, Tensor]]) -> SparseAttentionOutput:
    """Merge partial results `(out, lse)` into the result of attending to all their keys at once.

    Args:
        states: pairs of out (batch, seqlen_q, q_heads, head_dim_v) and lse (batch, q_heads, seqlen_q), computed over
            disjoint sets of keys; packed tensors have no batch dimension.

    Returns:
        (out, lse). A query that sees nothing in any state has out = 0 and lse = -inf. Differentiable.

    Raises:
        ValueError: `states` is empty, or shapes differ.
        TypeError: a tensor does not hold floats.
    """
    if not states:
        raise ValueError("`states` must contain at least one (out, lse)")
    for out, lse in states:
        fits = out.ndim in (3, 4) and lse.shape == (*out.shape[:-3], out.shape[-2], out.shape[-3])
        if out.shape != states[0][0].shape or not fits:
            raise ValueError(
                "`states` must agree in shape: out (batch, seqlen_q, q_heads, head_dim_v) and lse (batch, q_heads, "
                f"seqlen_q), without batch if packed, got out {tuple(out.shape)} and lse {tuple(lse.shape)}"
            )
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise TypeError(f"`states` must hold floats, got out {out.dtype} and lse {lse.dtype}")
    outs = torch.stack([out for out, _ in states])
    lses = torch.stack([lse for _, lse in states])
    nothing = (lses == -torch.inf).all(0)
    finite = lses.masked_fill(nothing, 0.0)
    lse = finite.logsumexp(0)
    weights = (finite - lse).exp().masked_fill(nothing, 0.0)
    merged = (outs * weights.transpose(-1, -2)[..., None]).sum(0).to(outs.dtype)
    return SparseAttentionOutput(merged, lse.masked_fill(nothing, -torch.inf))
