# SPDX-License-Identifier: Apache-2.0
"""ctypes structures equal to those of `core/source/args.h`, and functions that fill them from tensors."""

from __future__ import annotations

from ctypes import POINTER, Structure, addressof, c_double, c_int64, c_void_p
from struct import Struct
from typing import ClassVar

import torch
from torch import Tensor

from dynaxx.kernels.cpu.threads import num_threads

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # equal to those in core/source/elements.h


class WorkPlan(Structure):
    """A layout prepared for the core. It contains only pointers; `LayoutPlan` owns the memory."""

    _fields_: ClassVar = [
        ("seqlen", c_int64),
        ("block", c_int64),
        ("visited_seqlen", c_int64),
        ("visited_block", c_int64),
        ("layout_batch", c_int64),
        ("layout_heads", c_int64),
        ("indptr", c_void_p),
        ("indices", c_void_p),
        ("masks", c_void_p),
        ("row_order", c_void_p),
        ("mask_words", c_void_p),
        ("mask_runs", c_void_p),
        ("ranks", c_void_p),
    ]


_FORWARD = Struct("=5Q 6q 3q3q3q Q 2d q Q")  # a ctypes.Structure would take three times as long: 1 us more per call


def forward_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> bytes:
    """Return the bytes of `ForwardArgs` for one launch; `plan` is the address of the layout's plan."""
    batch, _, q_heads, head_dim = q.shape
    return _FORWARD.pack(
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
        v.shape[3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        plan,
        scale,
        softcap or 0.0,
        num_threads(),
        0 if sinks is None else sinks.data_ptr(),
    )


class BackwardArgs(Structure):
    """Arguments of one backward launch."""

    _fields_: ClassVar = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("grad", c_void_p),
        ("dq", c_void_p),
        ("dk", c_void_p),
        ("dv", c_void_p),
        ("element", c_int64),
        ("lse", c_void_p),
        ("lse_grad", c_void_p),
        ("delta", c_void_p),
        ("turns", c_void_p),
        ("dq_low", c_void_p),
        ("dk_low", c_void_p),
        ("dv_low", c_void_p),
        ("batch", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("q_strides", c_int64 * 3),
        ("k_strides", c_int64 * 3),
        ("v_strides", c_int64 * 3),
        ("out_strides", c_int64 * 3),
        ("grad_strides", c_int64 * 3),
        ("dq_strides", c_int64 * 3),
        ("dk_strides", c_int64 * 3),
        ("dv_strides", c_int64 * 3),
        ("plan", POINTER(WorkPlan)),
        ("scale", c_double),
        ("softcap", c_double),
        ("threads", c_int64),
        ("wave", c_int64),
        ("part", c_int64),
    ]


_NOTHING = c_int64(0)


def address(x: Tensor | None) -> int | None:
    """Return the address of an optional tensor; None if it is absent.

    torch gives empty tensors the address 0, which the core would read as "absent". They get a valid address instead.
    """
    return None if x is None else x.data_ptr() or addressof(_NOTHING)


def readable(x: Tensor) -> Tensor:
    """Return x if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the (batch, token, head) strides in elements."""
    batch, token, head, _ = x.stride()
    return batch, token, head
