"""What the host passes to every kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynaxx.kernels.gpu.device import has_tma, interpreted, padded
from dynaxx.kernels.gpu.runtime.launcher import kind_of
from dynaxx.layout import BlockLayout

# What a kernel is not compiled again for, whatever its value.
RUNTIME_SIZES = [
    "capacity",
    "num_masks",
    "layout_stride_b",
    "layout_stride_h",
    "seqlen_q",
    "padded_q",
    "seqlen_k",
    "batch",
    "q_heads",
    "group_size",
    "span",
]


def zeros_like_lse(lse: Tensor, layout: BlockLayout) -> Tensor:
    """Zeros without a kernel that writes them: a layout's first offset, which is 0, read as fp32 for every query."""
    return layout.kv_indptr.view(torch.float32).as_strided(lse.shape, (0, 0, 0))


def unit_stride(x: Tensor) -> Tensor:
    """`x` itself where its last dimension is dense, as it is for every transposed or sliced view; else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale > 0, so that the largest scaled score is the scaled largest score."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def steps_by_tma(*tensors: Tensor) -> bool:
    """Whether the copy unit of Hopper and later can step through (B, N, H, D) tensors: half precision, 16-byte steps.

    Under the interpreter as well, which knows descriptors and so tests those kernels, too.
    """
    if tensors[0].itemsize != 2 or not (has_tma(tensors[0].device) if tensors[0].is_cuda else interpreted()):
        return False
    return all(_steps(x.shape, x.stride()) and x.data_ptr() % 16 == 0 for x in tensors)


@lru_cache(maxsize=4096)
def _steps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    steps = [strides[i] for i in range(3) if shape[i] > 1]
    return shape.numel() > 0 and shape[3] % 8 == 0 and all(step > 0 and step % 8 == 0 for step in steps)


def tile_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (B, N, H, D), as `steps_by_tma` takes it, that loads `rows` rows of one head at a time."""
    return rebased(_tile_rows(x.shape, x.stride(), x.dtype, rows), x)


@lru_cache(maxsize=4096)
def _tile_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> TensorDescriptor:
    return as_template(TensorDescriptor(nowhere(dtype), *heads_apart(shape, strides), [1, 1, rows, padded(shape[3])]))


def tile_values(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (B, H, N, 2) fp32, contiguous with N even, that loads the numbers of `rows` rows of one head."""
    return rebased(_tile_values(x.shape, rows), x)


@lru_cache(maxsize=4096)
def _tile_values(shape: torch.Size, rows: int) -> TensorDescriptor:
    numbers = shape[2] * shape[3]
    steps = [shape[1] * numbers, numbers, 1]
    described = [shape[0], shape[1], numbers]
    return as_template(TensorDescriptor(nowhere(torch.float32), described, steps, [1, 1, rows * shape[3]]))


def heads_apart(shape: torch.Size, strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and strides of (B, N, H, D) as (B, H, N, D), with strides that TMA takes."""
    turned = [shape[i] for i in (0, 2, 1, 3)]
    steps = [strides[i] if shape[i] > 1 else shape[3] for i in (0, 2, 1)]  # of a single entry it is any number
    return turned, [*steps, 1]


def nowhere(dtype: torch.dtype) -> Tensor:
    """What a template describes."""
    return torch.empty(0, dtype=dtype, device="meta")


def as_template(descriptor: Any) -> Any:
    """A descriptor of `nowhere` that `rebased` copies: checked once, and once asked what a kernel is compiled for."""
    descriptor.kind = kind_of(descriptor)
    return descriptor


def rebased(template: Any, x: Tensor | None) -> Any:
    """The template of x's shape, strides and dtype, for x, which begins at 16 bytes."""
    found = object.__new__(type(template))
    found.__dict__ = {**template.__dict__, "base": x}
    return found


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of batch, sequence and heads, as the kernels name them."""
    return {f"stride_{name}b": x.stride(0), f"stride_{name}n": x.stride(1), f"stride_{name}h": x.stride(2)}


def layout_arguments(layout: BlockLayout) -> tuple[Tensor | int, ...]:
    """A layout as a kernel takes it: its tensors, capacity, number of masks, and strides of batch and head in rows."""
    return (
        layout.kv_indptr.contiguous(),
        layout.kv_num_partial.contiguous(),
        layout.kv_indices.contiguous(),
        layout.kv_masks.contiguous(),
        *mask_arguments(layout, layout.kv_indices.numel()),
    )


def order_argument(layout: BlockLayout) -> tuple[Tensor, bool]:
    """The order in which to start rows, and whether there is one; else any tensor."""
    order = layout.kv_order
    return (layout.kv_indptr, False) if order is None else (order, True)


def transposed_arguments(layout: BlockLayout) -> tuple[Tensor | int, ...]:
    """`layout_arguments` of the same blocks by kv block."""
    turned = layout.transposed
    return (
        turned.q_indptr.contiguous(),
        turned.q_num_partial.contiguous(),
        turned.q_indices.contiguous(),
        turned.q_masks.contiguous(),
        *mask_arguments(layout, turned.q_indices.numel()),
    )


def mask_arguments(layout: BlockLayout, capacity: int) -> tuple[Tensor | int, ...]:
    """The element masks, and the sizes that keep a kernel inside of the tensors."""
    return (
        layout.masks.bits.contiguous(),
        layout.masks.bands.contiguous(),
        capacity,
        len(layout.masks),
        layout.layout_heads if layout.layout_batch > 1 else 0,
        1 if layout.layout_heads > 1 else 0,
    )
