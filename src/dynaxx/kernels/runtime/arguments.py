# SPDX-License-Identifier: Apache-2.0
"""Kernel arguments: layouts, strides, and descriptors of the tensors that TMA (Hopper's copy unit) reads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynaxx.kernels.device import gpu_of, padded
from dynaxx.kernels.runtime.launcher import kind_of
from dynaxx.layout import BlockLayout

# Arguments whose values never specialize a kernel.
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
    """Return a view of zeros in the shape of lse without a kernel: it repeats a layout's first offset, which is 0."""
    return layout.kv_indptr.view(torch.float32).as_strided(lse.shape, (0, 0, 0))


def unit_stride(x: Tensor) -> Tensor:
    """Return x if its last dimension is dense, as in every transposed or sliced view, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a scale > 0 that give the same scores, so that the largest score stays the largest after scaling."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def steps_by_tma(*tensors: Tensor) -> bool:
    """Return whether TMA can read (B, N, H, D) tensors: half precision, strides and addresses multiples of 16 bytes.

    Also true under the interpreter, which supports descriptors, so that it tests the kernels that use them.
    """
    if tensors[0].itemsize != 2 or not gpu_of(tensors[0].device).has_tma:
        return False
    return all(_steps(x.shape, x.stride()) and x.data_ptr() % 16 == 0 for x in tensors)


@lru_cache(maxsize=4096)
def _steps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    steps = [strides[i] for i in range(3) if shape[i] > 1]
    return shape.numel() > 0 and shape[3] % 8 == 0 and all(step > 0 and step % 8 == 0 for step in steps)


def tile_rows(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Return a descriptor of x (B, N, H, D) that loads `rows` rows of one head; x must satisfy `steps_by_tma`.

    A tile has `columns` columns, by default D rounded up to a power of two; columns beyond D load as zeros.
    """
    return rebased(_tile_rows(x.shape, x.stride(), x.dtype, rows, columns or padded(x.shape[3])), x)


@lru_cache(maxsize=4096)
def _tile_rows(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int
) -> TensorDescriptor:
    return as_template(TensorDescriptor(nowhere(dtype), *heads_apart(shape, strides), [1, 1, rows, columns]))


def tile_values(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of x (B, H, N, 2) fp32, contiguous, N even, that loads `rows` rows of one head."""
    return rebased(_tile_values(x.shape, rows), x)


@lru_cache(maxsize=4096)
def _tile_values(shape: torch.Size, rows: int) -> TensorDescriptor:
    numbers = shape[2] * shape[3]
    steps = [shape[1] * numbers, numbers, 1]
    described = [shape[0], shape[1], numbers]
    return as_template(TensorDescriptor(nowhere(torch.float32), described, steps, [1, 1, rows * shape[3]]))


def heads_apart(shape: torch.Size, strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return shape and strides of (B, N, H, D) as (B, H, N, D), with strides that TMA accepts."""
    turned = [shape[i] for i in (0, 2, 1, 3)]
    steps = [strides[i] if shape[i] > 1 else shape[3] for i in (0, 2, 1)]  # the stride of a single entry is arbitrary
    return turned, [*steps, 1]


def nowhere(dtype: torch.dtype) -> Tensor:
    """Return an empty tensor without memory, for descriptor templates."""
    return torch.empty(0, dtype=dtype, device="meta")


def as_template(descriptor: Any) -> Any:
    """Prepare a descriptor of `nowhere` for `rebased`: store once what a kernel is specialized on."""
    descriptor.kind = kind_of(descriptor)
    return descriptor


def rebased(template: Any, x: Tensor | None) -> Any:
    """Return a copy of the template for x, whose address must be a multiple of 16 bytes."""
    found = object.__new__(type(template))
    found.__dict__ = {**template.__dict__, "base": x}
    return found


class Strides(NamedTuple):
    """Strides of a tensor (B, N, H, D) as one kernel argument; the stride of D is 1."""

    b: int
    n: int
    h: int


def strides_of(x: Tensor) -> Strides:
    """Return the strides of a tensor (B, N, H, D) whose last dimension is dense."""
    return Strides(x.stride(0), x.stride(1), x.stride(2))


class PackedStrides(NamedTuple):
    """Strides of a packed tensor (T, H, D) as one kernel argument; the stride of D is 1."""

    n: int
    h: int


def packed_strides_of(x: Tensor) -> PackedStrides:
    """Return the strides of a packed tensor (T, H, D) whose last dimension is dense."""
    return PackedStrides(x.stride(0), x.stride(1))


class LayoutTables(NamedTuple):
    """The tensors of a layout as one kernel argument: rows of kv blocks, or columns of q blocks if it is transposed."""

    p_indptr: Tensor
    p_num_partial: Tensor
    p_indices: Tensor
    p_mask_ids: Tensor  # of the entries
    p_bits: Tensor  # (masks, Q_BLOCK, words of 32 keys) int32
    p_bands: Tensor  # (masks, 2) int32


class LayoutArguments(NamedTuple):
    """A layout as kernel arguments."""

    tables: LayoutTables
    capacity: int  # slots of `p_indices`
    num_masks: int
    batch_stride: int  # layout heads from one batch entry to the next; 0 if all share one layout
    head_stride: int  # 1, or 0 if all heads share one layout


def layout_arguments(layout: BlockLayout) -> LayoutArguments:
    """Return a layout as kernel arguments."""
    entries = (layout.kv_indptr, layout.kv_num_partial, layout.kv_indices, layout.kv_masks)
    return _layout_arguments(layout, entries)


def order_argument(layout: BlockLayout) -> tuple[Tensor, bool]:
    """Return the order in which rows start, and True; an arbitrary tensor and False if the layout has no order."""
    order = layout.kv_order
    return (layout.kv_indptr, False) if order is None else (order, True)


def transposed_arguments(layout: BlockLayout) -> LayoutArguments:
    """Return `layout_arguments` of the transposed layout, which lists q blocks by kv block."""
    turned = layout.transposed
    return _layout_arguments(layout, (turned.q_indptr, turned.q_num_partial, turned.q_indices, turned.q_masks))


def _layout_arguments(layout: BlockLayout, entries: tuple[Tensor, ...]) -> LayoutArguments:
    return LayoutArguments(
        LayoutTables(*(x.contiguous() for x in (*entries, layout.masks.bits, layout.masks.bands))),
        entries[2].numel(),
        len(layout.masks),
        layout.layout_heads if layout.layout_batch > 1 else 0,
        1 if layout.layout_heads > 1 else 0,
    )
