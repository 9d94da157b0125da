"""`selected_attention`: each query position attends to its own blocks of keys, shared by a group of q heads."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dynaxx.errors import UnsupportedInputError
from dynaxx.kernels.problem import AttentionProblem
from dynaxx.layout.native import NativeSizes, NativeSpans, native_spans
from dynaxx.layout.packed import CuSeqlens
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import DTYPES
from dynaxx.ops.dispatch import unsupported_reasons

BACKENDS = ("triton", "cpu", "reference")  # in the order that "auto" prefers


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 64,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend, per query position, to the keys of its blocks at or before it, exactly. Differentiable.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys; packed (tokens, q_heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v).
        block_indices: (batch, seqlen_q, select_heads, slots), integers in any order, -1 for an empty slot; blocks
            count from the start of the sequence. Each of the select_heads, a multiple of kv_heads, chooses for
            q_heads / select_heads neighbouring q heads, any number of them.
        block_size: keys per block: 16, 32, 64 or 128.
        cu_seqlens_q, cu_seqlens_k: packed only, (num_seqs + 1,) cumulative lengths; keys as queries by default.
        scale: softmax scale, default head_dim ** -0.5.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", or "triton", "cpu", "reference".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v), or (out, lse) with lse (batch, q_heads, seqlen_q) fp32; packed
        without batch. A query that sees nothing gives out = 0, lse = -inf.

    Raises:
        ValueError, TypeError: inputs that do not fit together; on a CPU (and with DYNAXX_DEBUG=1 on a GPU) also an
            index out of range, or a block named twice by one query. On a GPU kernels skip an index out of range.
        UnsupportedInputError: no backend, or not the named one, can serve; with the reasons of each.
    """
    count = block_indices.shape[-1] if block_indices.ndim else 0
    sizes = NativeSizes(block_size, block_size, block_size, max(1, count), 0, 0)
    spans, packed = pack(q, k, v, sizes, cu_seqlens_q, cu_seqlens_k)
    if block_indices.ndim != q.ndim or block_indices.shape[: q.ndim - 2] != q.shape[:-2]:
        raise ValueError(
            f"`block_indices` must be {tuple(q.shape[:-2])} + (select_heads, slots), got {tuple(block_indices.shape)}"
        )
    indices = block_indices if packed.batch is None else block_indices.flatten(0, 1)
    check_indices(indices, packed, spans)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = attend_selected(packed.q, packed.k, packed.v, indices.to(torch.int32), spans, scale, backend)
    out = packed.unpack(out)
    if not return_lse:
        return out
    lse = lse if packed.batch is None else lse.unflatten(1, packed.batch).transpose(0, 1)
    return SparseAttentionOutput(out, lse)


@dataclass(frozen=True)
class Packed:
    """q, k, v without a batch dimension."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: tuple[int, int] | None  # (batch, seqlen_q) that q had

    def unpack(self, out: Tensor) -> Tensor:
        """(tokens, ...) as the caller's q has them."""
        return out if self.batch is None else out.view(*self.batch, *out.shape[1:])


def pack(
    q: Tensor, k: Tensor, v: Tensor, sizes: NativeSizes, ends_q: CuSeqlens | None, ends_k: CuSeqlens | None
) -> tuple[NativeSpans, Packed]:
    """Check that q, k, v fit together, and lay their sequences behind one another.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or lengths that do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            raise ValueError(
                f"`{name}` must be (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with `cu_seqlens_q`, "
                f"as q is, got {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise TypeError(f"`{name}` must be of q's dtype, one of {DTYPES}, got {x.dtype} beside {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"`{name}` must be on q's device {q.device}, got {x.device}")
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or k.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            "`q`, `k` and `v` must agree in batch, k and v in seqlen and heads, q and k in head_dim, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not (k.shape[-2] and q.shape[-1] and v.shape[-1]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q_heads must be a multiple of kv_heads, got {q.shape[-2]} and {k.shape[-2]}")
    if q.ndim == 4:
        if ends_q is not None or ends_k is not None:
            raise ValueError("`cu_seqlens_q` and `cu_seqlens_k` go with packed (tokens, heads, head_dim) inputs")
        batch = q.shape[0]
        ends_q, ends_k = (
            tuple(range(0, batch * n + 1, n)) if n else (0,) * (batch + 1) for n in (q.shape[1], k.shape[1])
        )
        packed = Packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), (batch, q.shape[1]))
    elif ends_q is None:
        raise ValueError("packed (tokens, heads, head_dim) inputs need `cu_seqlens_q`, e.g. (0, tokens)")
    else:
        packed = Packed(q, k, v, None)
    spans = native_spans(sizes, ends_q, ends_k, device=q.device)
    if (spans.ends_q[-1], spans.ends_k[-1]) != (packed.q.shape[0], packed.k.shape[0]):
        raise ValueError(
            f"`cu_seqlens_q` and `cu_seqlens_k` must end at the numbers of tokens {packed.q.shape[0]} and "
            f"{packed.k.shape[0]}, got {spans.ends_q[-1]} and {spans.ends_k[-1]}"
        )
    return spans, packed


def check_indices(indices: Tensor, packed: Packed, spans: NativeSpans) -> None:
    """Check (tokens, select_heads, slots) block indices; their values where that does not wait for a GPU.

    Raises:
        ValueError, TypeError: as `selected_attention`.
    """
    heads, q_heads, kv_heads = indices.shape[1], packed.q.shape[1], packed.k.shape[1]
    if heads == 0 or heads % kv_heads or q_heads % heads:
        raise ValueError(
            f"select_heads of `block_indices` must be a multiple of kv_heads {kv_heads} and divide q_heads {q_heads}, "
            f"got {heads}"
        )
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise TypeError(f"`block_indices` must be integers, got {indices.dtype}")
    if indices.device != packed.q.device:
        raise ValueError(f"`block_indices` must be on q's device {packed.q.device}, got {indices.device}")
    if indices.device.type != "cpu" and os.environ.get("DYNAXX_DEBUG") != "1":
        return
    lengths = torch.tensor(spans.ends_k).diff().add(spans.sizes.slc_block - 1) // spans.sizes.slc_block
    blocks = torch.repeat_interleave(lengths, torch.tensor(spans.ends_q).diff()).to(indices.device)[:, None, None]
    wrong = (indices < -1) | (indices >= blocks)
    if wrong.any():
        raise ValueError(
            "`block_indices` must be -1 or a block of the query's own sequence, "
            f"got {indices[wrong][0].item()} where there are {blocks.expand_as(indices)[wrong][0].item()} blocks"
        )
    ordered = indices.sort(-1).values
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ValueError("`block_indices` must not name a block twice for one query; set duplicates to -1")


def native_module(name: str) -> ModuleType:
    """The module of a backend that holds the kernels of Native Sparse Attention."""
    return importlib.import_module(f"dynaxx.kernels.{name}.native")


def native_backend(q: Tensor, k: Tensor, v: Tensor, block_size: int, backend: str) -> str:
    """The named backend, or the first that can serve packed q, k, v.

    Raises:
        ValueError, UnsupportedInputError: as `selected_attention`.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"`backend` must be 'auto' or one of {BACKENDS}, got {backend!r}")
    problem = native_problem(q, k, v, block_size)
    reasons = {name: unsupported_reasons(name, problem) for name in (BACKENDS if backend == "auto" else (backend,))}
    found = next((name for name, why in reasons.items() if not why), None)
    if found is None:
        raise UnsupportedInputError(str(problem), reasons)
    return found


def native_problem(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> AttentionProblem:
    """What a backend needs to know: q blocks of one position."""
    return AttentionProblem(
        device=q.device,
        dtype=q.dtype,
        batch=1,
        seqlen_q=q.shape[0],
        seqlen_k=k.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        block_size=(1, block_size),
        needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    )


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spans: NativeSpans, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Choose a backend and call it: (out (T, Hq, E), lse (Hq, T)) of packed inputs that were checked."""
    name = native_backend(q, k, v, spans.sizes.slc_block, backend)
    kernels = native_module(name)
    plan = kernels.prepare_selected(indices.contiguous(), spans, q, k, v)
    if name == "reference":
        return kernels.selected_forward(q, k, v, plan, scale)
    return _SelectedAttention.apply(q, k, v, plan, scale, kernels)


class _SelectedAttention(torch.autograd.Function):
    """Glue between a backend's forward and its backward; gradients flow through `out` and through `lse`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float, kernels: ModuleType) -> Any:
        out, lse = kernels.selected_forward(q, k, v, plan, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.kernels = plan, scale, kernels
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return *ctx.kernels.selected_backward(do, dlse, q, k, v, out, lse, ctx.plan, ctx.scale), None, None, None
