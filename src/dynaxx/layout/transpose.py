# SPDX-License-Identifier: Apache-2.0
"""A layout by kv block: what the backward pass over keys reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.layout.masks import FULL

if TYPE_CHECKING:
    from dynaxx.layout.block_layout import BlockLayout


@dataclass(frozen=True, eq=False)
class TransposedLayout:
    """A `BlockLayout` by kv block: the q blocks that visit it, partial ones first, ascending in each part."""

    q_indptr: Tensor  # (layout_batch, layout_heads, kv_blocks + 1) int32, absolute offsets into `q_indices`
    q_num_partial: Tensor  # (layout_batch, layout_heads, kv_blocks) int32
    q_indices: Tensor  # (nnz,) int32; on a GPU (capacity,), entries past the last row are ignored
    q_masks: Tensor  # as `q_indices`, values as `BlockLayout.kv_masks`


def transpose(layout: BlockLayout) -> TransposedLayout:
    """Return the same blocks by kv block, where the layout lies.

    A layout on a GPU is not read back: all slots up to the capacity are sorted, the unused ones to the end.
    """
    heads = layout.layout_batch * layout.layout_heads
    lines = heads * layout.kv_blocks
    ends = layout.kv_indptr[..., 1:].flatten().contiguous()
    known = layout.nnz if layout.device.type == "cpu" else layout.derived.nnz
    size = layout.kv_indices.numel() if known is None else known
    slots = torch.arange(size, device=ends.device, dtype=torch.int32)
    rows = torch.searchsorted(ends, slots, right=True, out_int32=True)
    cols, codes = layout.kv_indices[:size], layout.kv_masks[:size]
    unused = rows >= ends.numel() if known is None else None
    if heads > 1:
        head = rows // max(1, layout.q_blocks)
        cols = cols + head * layout.kv_blocks
        rows = rows - head * layout.q_blocks
    place = cols * 2 + (codes == FULL)
    if unused is not None:
        place = place.masked_fill(unused, 2 * lines)
    place, order = place.sort(stable=True)  # slots go by rows, and so do those of one place
    edges = torch.arange(2 * lines + 1, device=ends.device, dtype=torch.int32)
    starts = torch.searchsorted(place, edges, out_int32=True)  # of partial and of full blocks in turn
    shape = (layout.layout_batch, layout.layout_heads, layout.kv_blocks)
    steps = (2 * layout.layout_heads * layout.kv_blocks, 2 * layout.kv_blocks, 2)
    return TransposedLayout(
        q_indptr=starts.as_strided((*shape[:2], shape[2] + 1), steps).contiguous(),
        q_num_partial=(starts[1::2] - starts[:-1:2]).view(shape),
        q_indices=rows[order],
        q_masks=codes[order],
    )
