# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention (arXiv 2502.11089): compressed, selected and window attention, weighted by gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import resolved, typed
from dynaxx.derivatives import first_derivative_only
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout import CuSeqlens
from dynaxx.layout.host import never_traced, without_autocast
from dynaxx.trained.nsa.branches import (
    MixedBranches,
    compressed_attention,
    compressed_layout,
    gated_sum,
    layout_block,
    recorded,
    window_attention,
    window_layout,
)
from dynaxx.trained.nsa.kernels import reference as definition
from dynaxx.trained.nsa.kernels.contract import FusedBranches, NsaKernels, Pooling
from dynaxx.trained.nsa.spans import NsaSizes, NsaSpans
from dynaxx.trained.packing import Packed, pack
from dynaxx.trained.registry import NSA
from dynaxx.trained.selected import attend_selected, nsa_backend

FULL_ROWS = 1 << 19  # tokens * heads that fill a GPU; with half as many, a call takes a tenth longer than its share


@never_traced
@typed
def compression_windows(x: Tensor, sizes: NsaSizes, *, cu_seqlens: CuSeqlens | None = None) -> Tensor:
    """Gather the tokens behind each compressed token. Differentiable.

    Args:
        x: (batch, seqlen, heads, dim), or packed (tokens, heads, dim).
        sizes: windows of `cmp_block` tokens start every `cmp_stride` tokens.
        cu_seqlens: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.

    Returns:
        (batch, compressed tokens, cmp_block, heads, dim), or packed (compressed tokens, cmp_block, heads, dim).

    Raises:
        ValueError, TypeError: the rank or dtype is wrong, or the lengths do not match `x`.
    """
    spans, packed = pack(x, x, x, sizes, cu_seqlens, None)
    windows = definition.compression_windows(packed.k, spans)
    if packed.batch is None:
        return windows
    return windows.unflatten(0, (packed.batch[0], sizes.compressed(x.shape[1])))


@never_traced
@typed
def compress(
    x: Tensor, sizes: NsaSizes, weight: Tensor | None = None, *, cu_seqlens: CuSeqlens | None = None
) -> Tensor:
    """Pool windows of tokens into compressed tokens, by their mean or a weighted sum. Differentiable.

    Args:
        x: keys or values, (batch, seqlen, heads, dim), or packed (tokens, heads, dim).
        sizes: windows of `cmp_block` tokens start every `cmp_stride` tokens.
        weight: (cmp_block, heads), weight of each position in a window; the mean by default.
        cu_seqlens: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.

    Returns:
        (batch, compressed tokens, heads, dim), or packed (compressed tokens, heads, dim), in x's dtype.

    Raises:
        ValueError, TypeError: the rank, dtype or weight is wrong, or the lengths do not match `x`.
    """
    spans, packed = pack(x, x, x, sizes, cu_seqlens, None)
    if weight is not None and weight.shape != (sizes.cmp_block, x.shape[-2]):
        raise ValueError(
            f"`weight` must be (cmp_block, heads) = {(sizes.cmp_block, x.shape[-2])}, got {tuple(weight.shape)}"
        )
    pooled = _pool(packed.k, weight, spans)
    return pooled if packed.batch is None else pooled.unflatten(0, (packed.batch[0], sizes.compressed(x.shape[1])))


@without_autocast
def _pool(x: Tensor, weight: Tensor | None, spans: NsaSpans) -> Tensor:
    """Pool (tokens, heads, dim) to (compressed tokens, heads, dim); in one kernel if possible."""
    pooling = NSA.kernels(nsa_backend(x, x, x, spans.sizes.slc_block, "auto")).pooling
    if spans.equal_lengths is not None and pooling is not None:
        return _Pool.apply(x, weight, spans, pooling)
    if weight is None:
        return definition.compression_means(x, spans)
    return torch.einsum("wlhd,lh->whd", definition.compression_windows(x, spans), weight.to(x.dtype))


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, spans: NsaSpans, kernels: Pooling) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spans, ctx.kernels = spans, kernels
        return kernels.pool_forward(x, weight, spans)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do: Tensor) -> Any:
        return *ctx.kernels.pool_backward(do, *ctx.saved_tensors, ctx.spans), None, None


@never_traced
@typed
@torch.no_grad()
def select_nsa(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    spans: NsaSpans,
    *,
    select_heads: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Select blocks per query position from its attention to compressed tokens (arXiv 2502.11089, eq. 9 to 12).

    Args:
        q: (tokens, q_heads, head_dim), packed.
        k_cmp: (compressed tokens, kv_heads, head_dim).
        lse: (q_heads, tokens), log-sum-exp of the attention to compressed tokens. May be None to rank blocks by
            q @ k_cmp itself, if each compressed token is one block (cmp_block = cmp_stride = slc_block) and every q
            head selects for itself.
        spans: `nsa_spans` of the lengths; its sizes define how many blocks are selected and which are forced.
        select_heads: number of heads that select independently, each for a group of q heads; kv_heads by default.
        scale: softmax scale, default head_dim ** -0.5.
        backend: as for `selected_attention`.

    Returns:
        block_indices for `selected_attention`, (tokens, select_heads, slc_count) int32, ascending, padded with -1. No
        gradient flows through the selection.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `selected_attention`; ValueError also if `lse` is required.
    """
    heads = k_cmp.shape[1] if select_heads is None else select_heads
    sizes = spans.sizes
    if lse is None and (sizes.cmp_block, sizes.cmp_stride, heads) != (sizes.slc_block, sizes.slc_block, q.shape[1]):
        raise ValueError(
            "`lse` may be None only if cmp_block = cmp_stride = slc_block and select_heads = q_heads, "
            f"got {sizes} and {heads} heads for {q.shape[1]}"
        )
    if k_cmp.shape[0] != spans.ends_cmp[-1] or k_cmp.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"`k_cmp` must be (compressed tokens = {spans.ends_cmp[-1]}, kv_heads, head_dim = {q.shape[2]}), "
            f"got {tuple(k_cmp.shape)}"
        )
    scale = softmax_scale(scale, q.shape[-1])
    name = nsa_backend(q, k_cmp, k_cmp, sizes.slc_block, backend)
    return NSA.kernels(name).select_blocks(q, k_cmp, lse, spans, heads, scale)


@never_traced
@typed
@without_autocast
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compressed: tuple[Tensor, Tensor],
    gates: Tensor,
    sizes: NsaSizes,
    *,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend to compressed tokens, to selected blocks and to a window, and return the sum weighted by gates.

    Differentiable except for the selection of blocks. Each kv head selects blocks for its group of q heads.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys; packed (tokens, q_heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim); packed (tokens, kv_heads, head_dim). Any group size.
        v: (batch, seqlen_k, kv_heads, head_dim_v); packed (tokens, kv_heads, head_dim_v).
        compressed: (k_cmp, v_cmp), each (batch, compressed tokens, kv_heads, dim), as returned by `compress`; packed
            without batch.
        gates: (batch, seqlen_q, q_heads, 3), for the compressed, selected and window branch; packed without batch.
        sizes: sizes of the branches.
        cu_seqlens_q: packed inputs only: (num_seqs + 1,) cumulative lengths from 0.
        cu_seqlens_k: packed inputs only: cumulative lengths of the keys; defaults to `cu_seqlens_q`.
        scale: softmax scale, default head_dim ** -0.5.
        backend: "auto" for the best backend of each branch; "reference", "cpu", "triton" or "hopper" for all of them.

    Returns:
        (batch, seqlen_q, q_heads, head_dim_v) in q's dtype; packed without batch.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `selected_attention`.
    """
    spans, packed = pack(q, k, v, sizes, cu_seqlens_q, cu_seqlens_k)
    k_cmp, v_cmp = (x if packed.batch is None else x.flatten(0, 1) for x in map(resolved, compressed))
    wanted = [(spans.ends_cmp[-1], *x.shape[-2:]) for x in (k, v)]
    if [tuple(k_cmp.shape), tuple(v_cmp.shape)] != wanted:
        raise ValueError(
            f"`compressed` must hold k_cmp {wanted[0]} and v_cmp {wanted[1]} over all sequences, as from `compress`, "
            f"got {tuple(k_cmp.shape)} and {tuple(v_cmp.shape)}"
        )
    if gates.shape != (*q.shape[:-1], 3):
        raise ValueError(f"`gates` must be {(*q.shape[:-1], 3)}, got {tuple(gates.shape)}")
    scale = softmax_scale(scale, q.shape[-1])
    inputs = packed.q, packed.k, packed.v, k_cmp, v_cmp, gates if packed.batch is None else gates.flatten(0, 1)
    step = _kv_heads_at_once(*inputs)
    if step >= k.shape[-2]:
        return packed.unpack(_three_branches(inputs, spans, scale, backend))
    slices = zip(*(x.split(step, 1) for x in inputs), strict=True)
    return packed.unpack(torch.cat([_three_branches(some, spans, scale, backend) for some in slices], 1))


def _kv_heads_at_once(q: Tensor, k: Tensor, *others: Tensor) -> int:
    """Return how many kv heads to process together; usually all of them.

    With gradients on a GPU and a group size of 1, dk and dv are as large as dq, and each branch keeps its own until all
    are added. To save memory, only as many heads as fill the GPU then run together.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, *others))
    if not (needs_grad and q.is_cuda and q.shape[1] == k.shape[1]):
        return k.shape[1]
    return max(1, FULL_ROWS // max(1, q.shape[0]))


def _three_branches(inputs: tuple[Tensor, ...], spans: NsaSpans, scale: float, backend: str) -> Tensor:
    """Return out (T, Hq, E) of packed q, k, v, k_cmp, v_cmp and gates."""
    q, k, v, k_cmp, v_cmp, gates = inputs
    packed = Packed(q, k, v, None)
    with torch.no_grad():
        out_cmp, lse = compressed_attention(packed, k_cmp, v_cmp, spans, scale, backend)
    indices = select_nsa(packed.q, k_cmp, lse, spans, scale=scale, backend=backend)
    name = nsa_backend(q, k, v, spans.sizes.slc_block, backend)
    kernels = NSA.kernels(name)
    if kernels.fused is not None and q.shape[0] and k.shape[0]:
        plan = kernels.prepare_selected(indices.contiguous(), spans, q, k, v)
        return _mixed_branches(inputs, (out_cmp, lse), plan, kernels, kernels.fused, scale, backend)
    out_slc, _ = attend_selected(packed.q, packed.k, packed.v, indices, spans, scale, backend)
    out_swa, _ = window_attention(packed, spans, scale, backend)
    layout = compressed_layout(spans, layout_block(q))
    out_cmp = recorded(packed.q, k_cmp, v_cmp, (out_cmp, lse), layout, spans, scale, backend)
    return gated_sum((out_cmp, out_slc, out_swa), gates, name)


def _mixed_branches(
    inputs: tuple[Tensor, ...],
    compressed: tuple[Tensor, Tensor],
    plan: Any,
    kernels: NsaKernels,
    fused: FusedBranches,
    scale: float,
    backend: str,
) -> Tensor:
    """Like `_three_branches`, with one autograd function for all gradients and, if possible, one kernel for the sum."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    q, k, v, *_, gates = inputs
    out_cmp, lse_cmp = compressed
    with torch.no_grad():
        if not plan.attends_window:
            out_swa, lse_swa = window_attention(Packed(q, k, v, None), plan.spans, scale, backend)
        if plan.mixes:
            out = q.new_empty(out_cmp.shape)
            if plan.attends_window:
                out_swa, lse_swa = torch.empty_like(out) if needs_grad else out, torch.empty_like(lse_cmp)
            mixture = fused.Mixture(out_cmp, out_swa, gates, out, needs_grad, lse_swa if plan.attends_window else None)
            out_slc, lse_slc = fused.selected_and_mixed(q, k, v, plan, scale, mixture)
        else:
            out_slc, lse_slc = kernels.selected_forward(q, k, v, plan, scale)
            assert kernels.gating is not None, "a backend that fuses branches also has a kernel for their gated sum"
            out = kernels.gating.gated_sum_forward((out_cmp, out_slc, out_swa), gates)
    if not needs_grad:
        return out
    layouts = tuple(layout_of(plan.spans, layout_block(out)) for layout_of in (compressed_layout, window_layout))
    results = out_cmp, out_slc, out_swa, lse_cmp, lse_slc, lse_swa
    return MixedBranches.apply(*inputs, *results, out, fused, plan, layouts, scale)
