# SPDX-License-Identifier: Apache-2.0
"""Structures of `core/source/args.h`, and functions that fill them from tensors."""

from __future__ import annotations

from ctypes import addressof
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from dynaxx.core.structures import structure
from dynaxx.derivatives import check_memory
from dynaxx.kernels.runtime.core_threads import num_threads
from dynaxx.layout.host import address

PANEL = 16  # queries per panel, equal to that in core/source/vec.h
LOG2_E = 1.4426950408889634
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # equal to those in core/source/elements.h
WorkPlan = structure("Plan")
BackwardArgs = structure("BackwardArgs")


_FORWARD = Struct("=5Q 6q 3q3q3q Q 2d q 2Q")  # a ctypes.Structure would take three times as long: 1 us more per call


def forward_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Any,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> bytes:
    """Return the bytes of `ForwardArgs` for one launch. The caller has made `out` and `lse` for q and v.

    Raises:
        RuntimeError: a tensor has another dtype, shape or device than the core assumes; see `layout.host.address`.
    """
    dtype, (batch, seqlen_q, q_heads, head_dim) = q.dtype, q.shape
    (*of_k, k_head_dim), (*of_v, head_dim_v) = k.shape, v.shape
    (*q_strides, q_step), (*k_strides, k_step), (*v_strides, v_step) = q.stride(), k.stride(), v.stride()
    if not (
        k.dtype is v.dtype is dtype
        and of_k == of_v == [batch, plan.visited_seqlen, of_v[2]]
        and seqlen_q == plan.seqlen
        and k_head_dim == head_dim
        and ((q_step == k_step == 1) or head_dim == 1)
        and (v_step == 1 or head_dim_v == 1)
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
    ):
        raise RuntimeError(
            "the CPU core needs q, k and v that fit each other and the plan of the layout, "
            f"got {q.dtype} {tuple(q.shape)}, {k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}"
        )
    check_memory(q, k, v)
    return _FORWARD.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        ELEMENTS[dtype],
        batch,
        q_heads,
        of_v[2],
        head_dim,
        head_dim_v,
        *q_strides,
        *k_strides,
        *v_strides,
        addressof(plan),
        scale,
        softcap or 0.0,
        num_threads(),
        0 if sinks is None else address(sinks, torch.float32, (q_heads,)),
        0 if bias is None else address(bias, torch.float32, (batch, q_heads, seqlen_q + of_k[1] - 1 + PANEL)),
    )


def bias_of_core(bias: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return a bias in the core's unit of scores, which it multiplies by softcap or |scale|, and padded by a panel."""
    unit = softcap or abs(scale) or 1 / LOG2_E
    return torch.nn.functional.pad(bias.detach() / unit, (0, PANEL)).contiguous()


def readable(x: Tensor) -> Tensor:
    """Return x if its last dimension is contiguous, else a contiguous copy."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps the strides of an empty tensor


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the (batch, token, head) strides in elements."""
    batch, token, head, _ = x.stride()
    return batch, token, head
