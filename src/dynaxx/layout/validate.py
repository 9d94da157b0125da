# SPDX-License-Identifier: Apache-2.0
"""Checks of a `BlockLayout`: shapes, dtypes and devices at construction, values on request."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.core.library import present_library
from dynaxx.core.structures import OK
from dynaxx.derivatives import transforms_active
from dynaxx.layout.fields import LayoutFields
from dynaxx.layout.grid import as_block_size
from dynaxx.layout.host import address, never_traced
from dynaxx.layout.masks import FULL, ElementMasks


def check_form(layout: LayoutFields) -> None:
    """Check shapes, dtypes and devices; raises like `BlockLayout`."""
    as_block_size(layout.block_size)
    if transforms_active() and any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in layout.tensors):
        raise NotImplementedError(
            "a layout cannot be made of tensors that a transform of torch.func (grad, vjp, vmap) maps; make it before "
            "the transformed function"
        )
    tensors = {"kv_indptr": 3, "kv_num_partial": 3, "kv_indices": 1, "kv_masks": 1}
    for name, rank in tensors.items():
        tensor: Tensor = getattr(layout, name)
        if tensor.dtype != torch.int32 or tensor.ndim != rank:
            raise ValueError(f"`{name}` must be int32 of rank {rank}, got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device != layout.kv_indptr.device:
            raise ValueError(f"`{name}` must be on {layout.kv_indptr.device}, got {tensor.device}")
    rows = (*layout.kv_indptr.shape[:2], layout.q_blocks)
    if layout.kv_indptr.shape[2] != layout.q_blocks + 1:
        raise ValueError(
            f"`kv_indptr` must have q_blocks + 1 = {layout.q_blocks + 1} offsets per head, "
            f"got {layout.kv_indptr.shape[2]}"
        )
    if tuple(layout.kv_num_partial.shape) != rows:
        raise ValueError(f"`kv_num_partial` must be {rows}, got {tuple(layout.kv_num_partial.shape)}")
    if layout.kv_masks.shape != layout.kv_indices.shape:
        raise ValueError(
            "`kv_masks` must have one entry per entry of `kv_indices`, "
            f"got {layout.kv_masks.numel()} and {layout.kv_indices.numel()}"
        )
    _check_masks(layout)


def _check_masks(layout: LayoutFields) -> None:
    """Check that the element masks match the layout's block size and device."""
    masks, (q_block, kv_block) = layout.masks, layout.block_size
    if not isinstance(masks, ElementMasks):
        raise TypeError(f"`masks` must be ElementMasks, got {type(masks).__name__}")
    bits, bands, words = masks.bits, masks.bands, -(-kv_block // 32)
    if (
        bits.dtype == bands.dtype == torch.int32
        and bits.shape[1:] == (q_block, words)
        and bands.shape == (bits.shape[0], 2)
        and bits.device == bands.device == layout.kv_indptr.device
        and masks.kv_block == kv_block
    ):
        return
    wanted = {"bits": (len(masks), q_block, words), "bands": (len(masks), 2)}
    for name, shape in wanted.items():
        tensor: Tensor = getattr(masks, name)
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise ValueError(
                f"`masks.{name}` must be int32 {shape} for blocks of {layout.block_size}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.device != layout.kv_indptr.device:
            raise ValueError(f"`masks.{name}` must be on {layout.kv_indptr.device}, got {tensor.device}")
    if masks.kv_block != kv_block:
        raise ValueError(f"`masks` must have the layout's kv_block = {kv_block}, got {masks.kv_block}")


def check_values(layout: LayoutFields) -> None:
    """Check all values; see `BlockLayout.validate`."""
    if layout.derived.refused is not None and bool(layout.derived.refused.any()):
        raise ValueError(
            f"`block_indices` must be -1 or in [0, kv_blocks = {layout.kv_blocks}) and not name a block twice in one "
            f"row, got {int(layout.derived.refused.sum())} others, which were left out"
        )
    if layout.q_blocks == 0 or _core_accepts(layout):
        return
    starts = layout.kv_indptr.flatten(0, 1)
    if int(starts[0, 0]) != 0 or (starts.diff(dim=-1) < 0).any() or (starts[1:, 0] != starts[:-1, -1]).any():
        raise ValueError("`kv_indptr` must start at 0, never decrease, and continue from one head to the next")
    if layout.nnz > layout.kv_indices.numel():
        raise ValueError(f"`kv_indptr` must end within `kv_indices`, got {layout.nnz} > {layout.kv_indices.numel()}")
    if ((layout.kv_num_partial < 0) | (layout.kv_num_partial > layout.kv_num_blocks)).any():
        raise ValueError("`kv_num_partial` must lie between 0 and the row's number of blocks")
    flat_rows, cols, mask_ids = layout.entries()
    if cols.numel() and not 0 <= int(cols.amin()) <= int(cols.amax()) < layout.kv_blocks:
        raise ValueError(
            f"`kv_indices` must be in [0, kv_blocks = {layout.kv_blocks}), got {int(cols.amin())} to {int(cols.amax())}"
        )
    position = torch.arange(cols.numel(), device=layout.device) - layout.kv_indptr[..., :-1].flatten()[flat_rows]
    partial = position < layout.kv_num_partial.flatten()[flat_rows]
    if not torch.where(partial, (mask_ids >= 0) & (mask_ids < len(layout.masks)), mask_ids == FULL).all():
        raise ValueError(f"`kv_masks` must be -1 for full blocks and in [0, {len(layout.masks)}) for partial ones")
    visited = (flat_rows * layout.kv_blocks + cols).sort().values
    if (visited[1:] == visited[:-1]).any():
        raise ValueError("`kv_indices` must not name a block twice in one row")


@never_traced
def _core_accepts(layout: LayoutFields) -> bool:
    """Return whether the C++ core finds every value in range; False if it cannot be used. One pass, O(nnz)."""
    library = present_library() if layout.device.type == "cpu" else None
    if library is None:
        return False
    tensors = [x.contiguous() for x in layout.tensors[:4]]
    heads = layout.layout_batch * layout.layout_heads
    sizes = (heads, layout.q_blocks, layout.kv_blocks, len(layout.masks), layout.kv_indices.numel())
    return library.dynaxx_cpu_plan_check(*(address(x, torch.int32, x.shape) for x in tensors), *sizes) == OK
