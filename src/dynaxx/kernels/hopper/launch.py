"""What the host passes to the Hopper kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def dense_rows(x: Tensor) -> Tensor:
    """`x` where TMA can step through it: dense rows, 16-byte strides; else a copy."""
    aligned = all(x.stride(i) * x.itemsize % 16 == 0 and x.stride(i) > 0 for i in range(3) if x.shape[i] > 1)
    if aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # also where it is dense, but begins between two such steps


def tma_view(x: Tensor) -> Tensor:
    """(B, N, H, D) as (B, H, N, D), with strides that TMA takes."""
    x = dense_rows(x).transpose(1, 2)
    strides = [x.stride(i) if x.shape[i] > 1 else x.shape[3] for i in range(3)]  # of a single entry it is any number
    return x.as_strided(x.shape, (*strides, 1))


def gluon_rows(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """`rows` rows of one head of (B, N, H, D) at a time, or of `columns` of its columns; for Gluon."""
    view = tma_view(x)
    block = [1, 1, rows, columns or view.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block, layout)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
