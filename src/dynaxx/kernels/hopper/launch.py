"""What the host passes to the Hopper kernels."""

from __future__ import annotations

import torch
from torch import Tensor


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
