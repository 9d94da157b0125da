"""Attention forward: hand the tensors to the core, or gather in torch."""

from __future__ import annotations

from ctypes import CDLL, byref

import torch
from torch import Tensor

from dynaxx.kernels.cpu import gather
from dynaxx.kernels.cpu.arguments import ELEMENTS, ForwardArgs, readable, strides
from dynaxx.kernels.cpu.library import active_library
from dynaxx.kernels.cpu.plan import plan_of
from dynaxx.layout import BlockLayout


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N), natural log, in fp32; both contiguous.

    q (B, N, Hq, D), k (B, M, Hk, D) and v (B, M, Hk, E) may have any strides; a last dimension that is not contiguous
    is copied. fp16 and bf16 are widened in the core, computed in fp32 and rounded once. Runs on
    `torch.get_num_threads()` threads.
    """
    library = active_library()
    if library is None:
        return gather.attention_forward(q, k, v, layout, scale, softcap)
    return _core_forward(library, readable(q), readable(k), readable(v), layout, scale, softcap)


def _core_forward(
    library: CDLL, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, q_heads, head_dim = q.shape
    head_dim_v = v.shape[3]
    out = q.new_empty(batch, seqlen_q, q_heads, head_dim_v)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    args = ForwardArgs(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        ELEMENTS[q.dtype],
        batch,
        q_heads,
        k.shape[2],
        head_dim,
        head_dim_v,
        strides(q),
        strides(k),
        strides(v),
        plan_of(layout, library).pointer,
        scale,
        softcap or 0.0,
        torch.get_num_threads(),
    )
    if library.dynaxx_cpu_forward(byref(args)):
        raise MemoryError("the CPU core could not allocate its working memory")
    return out, lse
