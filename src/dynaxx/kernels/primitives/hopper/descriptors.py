# SPDX-License-Identifier: Apache-2.0
"""Arguments of the Hopper kernels: TMA descriptors and factors of scores."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from dynaxx.kernels.runtime.arguments import as_template, heads_apart, nowhere, rebased
from dynaxx.kernels.runtime.launcher import DESCRIPTORS

DESCRIPTORS.add(GluonDescriptor)

LOG2E = 1.4426950408889634
_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def gluon_type(dtype: torch.dtype) -> Any:
    """Return Gluon's name of a dtype."""
    return _DTYPES[dtype]


def dense_rows(x: Tensor) -> Tensor:
    """Return x if TMA can read it (dense rows, strides multiples of 16 bytes), else a copy."""
    if _steps(x.shape, x.stride(), x.itemsize) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # also for a dense x whose address is not a multiple of 16


@lru_cache(maxsize=4096)
def _steps(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> bool:
    aligned = all(strides[i] * itemsize % 16 == 0 and strides[i] > 0 for i in range(3) if shape[i] > 1)
    return aligned and strides[3] == 1


def gluon_rows(x: Tensor, rows: int, columns: int | None = None) -> Any:
    """Return a Gluon descriptor that loads `rows` rows of one head of (B, N, H, D), all or `columns` of its columns."""
    template = _gluon_rows(x.shape, x.stride(), x.dtype, rows, columns or x.shape[3])
    if template is None or x.data_ptr() % 16:
        return gluon_rows(dense_rows(x), rows, columns)
    return rebased(template, x)


@lru_cache(maxsize=4096)
def _gluon_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int) -> Any | None:
    if not _steps(shape, strides, dtype.itemsize):
        return None
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[dtype])
    return as_template(GluonDescriptor(nowhere(dtype), *heads_apart(shape, strides), block, layout))


def score_factors(scale: float, softcap: float | None) -> dict[str, float | None]:
    """Return the factors of scores in base 2: the factor of q . k or its tanh, and the factor inside the tanh."""
    if softcap is None:
        return {"scale_log2": scale * LOG2E, "cap_rate": None}
    return {"scale_log2": softcap * LOG2E, "cap_rate": scale / softcap}
