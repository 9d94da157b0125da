"""`sparse_attention`: exact softmax attention over the pairs that a layout shows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.ops.checks import check_inputs
from dynaxx.ops.dispatch import choose_backend, load_backend


class SparseAttentionOutput(NamedTuple):
    """What `sparse_attention(..., return_lse=True)` returns."""

    out: Tensor  # (batch, seqlen_q, q_heads, head_dim_v), q's dtype
    lse: Tensor  # (batch, q_heads, seqlen_q) fp32, natural log; -inf where a query sees nothing


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
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
    scale: float | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> SparseAttentionOutput: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend over the blocks of `layout`, exactly. Differentiable.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim); fp16, bf16, fp32 or fp64. Any strides.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v); q_heads must be a multiple of kv_heads.
        layout: of the same lengths; shared, or one per batch entry and per q head.
        scale: softmax scale, default head_dim ** -0.5.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", or "reference", "cpu", "triton", "hopper".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v), or (out, lse). A query that sees nothing gives out = 0, lse = -inf.

    Raises:
        ValueError, TypeError: inputs that do not fit together.
        UnsupportedInputError: no backend, or not the named one, can serve; with the reasons of each.
    """
    problem = check_inputs(q, k, v, layout)
    name = choose_backend(problem, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if name == "reference" or not problem.needs_grad:
        out, lse = load_backend(name).attention_forward(q, k, v, layout, scale)
    else:
        out, lse = _SparseAttention.apply(q, k, v, layout, scale, name)
    return SparseAttentionOutput(out, lse) if return_lse else out


class _SparseAttention(torch.autograd.Function):
    """Glue between a backend's forward and its backward; gradients flow through `out` and through `lse`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, name: str) -> Any:
        out, lse = load_backend(name).attention_forward(q, k, v, layout, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.name = layout, scale, name
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grads = load_backend(ctx.name).attention_backward(do, dlse, q, k, v, out, lse, ctx.layout, ctx.scale)
        return *grads, None, None, None
