# SPDX-License-Identifier: Apache-2.0
"""Group the blocks of a layout by kv block, for the backward pass over keys."""

from __future__ import annotations

import torch

from dynaxx.layout.derived import TransposedLayout
from dynaxx.layout.fields import LayoutFields
from dynaxx.layout.masks import FULL


def transpose(layout: LayoutFields) -> TransposedLayout:
    """Group the blocks of a layout by kv block, on the layout's device.

    GPU layouts are not read back: all slots up to the capacity are sorted, and unused slots go to the end.
    """
    heads = layout.layout_batch * layout.layout_heads
    lines = heads * layout.kv_blocks
    ends = layout.kv_indptr[..., 1:].flatten().contiguous()
    known = layout.nnz if layout.device.type == "cpu" else layout.derived.nnz
    size = layout.kv_indices.numel() if known is None else known
    slots = torch.arange(size, device=ends.device, dtype=torch.int32)
    rows = torch.searchsorted(ends, slots, right=True, out_int32=True)
    cols, mask_ids = layout.kv_indices[:size], layout.kv_masks[:size]
    unused = rows >= ends.numel() if known is None else None
    if heads > 1:
        head = rows // max(1, layout.q_blocks)
        cols = cols + head * layout.kv_blocks
        rows = rows - head * layout.q_blocks
    place = cols * 2 + (mask_ids == FULL)
    if unused is not None:
        place = place.masked_fill(unused, 2 * lines)
    place, order = place.sort(stable=True)  # slots are in row order, and a stable sort keeps it within each column
    edges = torch.arange(2 * lines + 1, device=ends.device, dtype=torch.int32)
    starts = torch.searchsorted(place, edges, out_int32=True)  # start of each column's partial blocks, then full blocks
    shape = (layout.layout_batch, layout.layout_heads, layout.kv_blocks)
    steps = (2 * layout.layout_heads * layout.kv_blocks, 2 * layout.kv_blocks, 2)
    return TransposedLayout(
        q_indptr=starts.as_strided((*shape[:2], shape[2] + 1), steps).contiguous(),
        q_num_partial=(starts[1::2] - starts[:-1:2]).view(shape),
        q_indices=rows[order],
        q_masks=mask_ids[order],
    )
