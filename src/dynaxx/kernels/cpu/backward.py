"""Attention backward: hand the tensors to the core, or let autograd run through the gathers in torch."""

from __future__ import annotations

from ctypes import CDLL, byref

import torch
from torch import Tensor

from dynaxx.kernels.cpu import gather
from dynaxx.kernels.cpu.arguments import ELEMENTS, BackwardArgs, readable, strides
from dynaxx.kernels.cpu.library import active_library
from dynaxx.kernels.cpu.plan import plan_of
from dynaxx.layout import BlockLayout

TASKS_PER_THREAD = 4  # fewer heads than that are split into strips of keys, each with its own sum of dq


def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtype and shape of q, k, v, with tokens or heads outermost in memory as these have them.

    do (B, N, Hq, E) is the gradient of out, dlse (B, Hq, N) that of lse, None for none; out and lse as the forward gave
    them. Any strides. Deterministic, bitwise, for a given number of threads: sums run in a fixed order.
    """
    library = active_library()
    if library is None:
        return gather.attention_backward(do, dlse, q, k, v, out, lse, layout, scale)
    dtype = q.dtype
    do, q, k, v, out = (readable(x) for x in (do, q, k, v, out))
    dq, dk, dv = _core_backward(library, do, q, k, v, out, lse, dlse, layout, scale)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _core_backward(
    library: CDLL,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    layout: BlockLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    threads = torch.get_num_threads()
    strips = num_strips(batch * q_heads, -(-seqlen_k // layout.block_size[1]), threads)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.float().contiguous()
    dq = _empty_like(q, (strips, batch, seqlen_q, q_heads, head_dim)).zero_()
    dk = _empty_like(k, (batch, seqlen_k, q_heads, head_dim))
    dv = _empty_like(v, (batch, seqlen_k, q_heads, head_dim_v))
    delta = torch.empty_like(lse)
    args = BackwardArgs(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        do.data_ptr(),
        ELEMENTS[q.dtype],
        lse.data_ptr(),
        None if dlse is None else dlse.data_ptr(),
        delta.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        dq.stride(0),
        batch,
        q_heads,
        kv_heads,
        head_dim,
        head_dim_v,
        strides(q),
        strides(k),
        strides(v),
        strides(out),
        strides(do),
        strides(dq[0]),
        strides(dk),
        strides(dv),
        plan_of(layout, library, rows_are_keys=True).pointer,
        scale,
        threads,
        strips,
    )
    if library.dynaxx_cpu_backward(byref(args)):
        raise MemoryError("the CPU core could not allocate its working memory")
    return dq.sum(0) if strips > 1 else dq[0], _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)


def num_strips(heads: int, kv_blocks: int, threads: int) -> int:
    """Into how many strips to split each head's rows of keys: one unless there are too few heads for the threads."""
    if threads == 1 or heads >= TASKS_PER_THREAD * threads or heads == 0:
        return 1
    return max(1, min(kv_blocks, -(-TASKS_PER_THREAD * threads // heads)))


def _empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fp32 memory of a (..., seqlen, heads, head_dim) shape, with tokens or heads outermost as x has them."""
    if x.stride(1) >= x.stride(2):
        return x.new_empty(shape, dtype=torch.float32)
    *batch, seqlen, heads, head_dim = shape
    return x.new_empty(*batch, heads, seqlen, head_dim, dtype=torch.float32).transpose(-3, -2)


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    """(B, M, Hq, D) -> (B, M, Hk, D), summed over the q heads of each group."""
    return x if x.shape[2] == kv_heads else x.unflatten(2, (kv_heads, -1)).sum(3)
