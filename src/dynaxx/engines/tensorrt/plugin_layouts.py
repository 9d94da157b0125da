# SPDX-License-Identifier: Apache-2.0
"""A layout as inputs of a network of TensorRT."""

from __future__ import annotations

from torch import Tensor

from dynaxx.layout import BlockLayout

# The inputs of `dynaxx::sparse_attention` after q, k and v.
LAYOUT_INPUTS = ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks", "mask_bits", "mask_bands")


def layout_tensors(layout: BlockLayout) -> dict[str, Tensor]:
    """Return a layout as the inputs of `dynaxx::sparse_attention`, in their order: int32, contiguous, not empty.

    Their sizes are (layout_batch, layout_heads, q_blocks + 1), (layout_batch, layout_heads, q_blocks), (capacity,),
    (capacity,), (masks, q_block, words) and (masks, 2).
    """
    masks = layout.masks
    found = (layout.kv_indptr, layout.kv_num_partial, layout.kv_indices, layout.kv_masks, masks.bits, masks.bands)
    return dict(zip(LAYOUT_INPUTS, (_not_empty(x).contiguous() for x in found), strict=True))


def _not_empty(x: Tensor) -> Tensor:
    """Return a tensor with at least one entry in each dimension; TensorRT takes no empty shapes as layouts."""
    return x if x.numel() else x.new_zeros([max(1, size) for size in x.shape])
