# SPDX-License-Identifier: Apache-2.0
"""Conversions between layouts and dense masks, and the count of visible pairs. For tests and small inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.derivatives import refuse_recording
from dynaxx.layout.entries import Entries
from dynaxx.layout.fields import LayoutFields
from dynaxx.layout.grid import BlockGrid
from dynaxx.layout.masks import FULL, ElementMasks


def entries_of_dense(mask: Tensor, block_size: tuple[int, int]) -> tuple[BlockGrid, Entries]:
    """Check a dense mask and list its visited blocks; see `BlockLayout.from_dense`."""
    refuse_recording("`from_dense`")
    if mask.dtype != torch.bool or mask.ndim not in (2, 4):
        raise ValueError(
            "`mask` must be bool, (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    mask = mask.view(1, 1, *mask.shape) if mask.ndim == 2 else mask
    batch, heads, seqlen_q, seqlen_k = mask.shape
    if not batch or not heads:
        raise ValueError(
            "`mask` must have at least one batch entry and one head, size 1 if all of them share the mask, "
            f"got {tuple(mask.shape)}"
        )
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal=False)
    (q_block, kv_block), (rows, cols) = block_size, (grid.q_blocks, grid.kv_blocks)
    pad = (0, cols * kv_block - seqlen_k, 0, rows * q_block - seqlen_q)
    tiles = torch.nn.functional.pad(mask, pad).view(batch, heads, rows, q_block, cols, kv_block).transpose(3, 4)
    in_range = torch.nn.functional.pad(torch.ones_like(mask[:1, :1]), pad)
    in_range = in_range.view(1, 1, rows, q_block, cols, kv_block).transpose(3, 4)
    full = (tiles | ~in_range).all(-1).all(-1)
    partial = tiles.any(-1).any(-1) & ~full
    batch_i, head_i, row, col = (partial | full).nonzero(as_tuple=True)
    flat_rows = (batch_i * heads + head_i) * rows + row
    mask_ids = torch.full_like(flat_rows, FULL)
    is_partial = partial[batch_i, head_i, row, col]
    masks, mask_ids[is_partial] = unique_masks(ElementMasks.from_dense(tiles[batch_i, head_i, row, col][is_partial]))
    return grid, Entries(flat_rows, col, mask_ids, masks, batch, heads)


def unique_masks(masks: ElementMasks) -> tuple[ElementMasks, Tensor]:
    """Return the distinct masks in bit order, and for each input mask its index among them, (num_masks,) int64."""
    bits = masks.bits
    if len(masks) < 2:
        return masks, torch.zeros(len(masks), dtype=torch.int64, device=bits.device)
    distinct, entry = bits.flatten(1).unique(dim=0, return_inverse=True)
    first = torch.full((distinct.shape[0],), len(masks), device=bits.device, dtype=torch.int64)
    first.scatter_reduce_(0, entry, torch.arange(len(masks), device=bits.device), "amin")
    return masks.take(first), entry


def layout_to_dense(layout: LayoutFields) -> Tensor:
    """Return the visibility of every pair as bool; see `BlockLayout.to_dense`."""
    q_block, kv_block = layout.block_size
    shape = (layout.layout_batch, layout.layout_heads)
    flat_rows, cols, mask_ids = layout.entries()
    tiles = torch.zeros(
        shape[0] * shape[1] * layout.q_blocks,
        layout.kv_blocks,
        q_block,
        kv_block,
        dtype=torch.bool,
        device=layout.device,
    )
    table = torch.cat([layout.masks.to_dense(), torch.ones_like(tiles[:1, :1, :, :].reshape(-1, q_block, kv_block))])
    if cols.numel():
        tiles[flat_rows, cols] = table[torch.where(mask_ids == FULL, table.shape[0] - 1, mask_ids)]
    dense = tiles.view(*shape, layout.q_blocks, layout.kv_blocks, q_block, kv_block).transpose(3, 4)
    dense = dense.reshape(*shape, layout.q_blocks * q_block, layout.kv_blocks * kv_block)
    return dense[..., : layout.seqlen_q, : layout.seqlen_k]


def visible_pairs(layout: LayoutFields) -> Tensor:
    """Count the visible pairs of each head; see `BlockLayout.visible_pairs`."""
    flat_rows, cols, mask_ids = layout.entries()
    q_block, kv_block = layout.block_size
    rows = flat_rows % layout.q_blocks if layout.q_blocks else flat_rows
    height = (layout.seqlen_q - rows * q_block).clamp(max=q_block)
    width = (layout.seqlen_k - cols * kv_block).clamp(max=kv_block)
    dense = layout.masks.to_dense()
    pairs = height * width
    partial = mask_ids != FULL
    whole = (height == q_block) & (width == kv_block)
    if len(layout.masks):
        counts = dense.sum((1, 2))
        pairs = torch.where(partial, counts[mask_ids.clamp(min=0)], pairs)
        for entry in (partial & ~whole).nonzero().flatten().tolist():
            h, w = int(height[entry]), int(width[entry])
            pairs[entry] = dense[mask_ids[entry], :h, :w].sum()
    heads = flat_rows // max(1, layout.q_blocks)
    total = torch.zeros(layout.layout_batch * layout.layout_heads, dtype=torch.int64, device=layout.device)
    return total.index_add_(0, heads, pairs).view(layout.layout_batch, layout.layout_heads)
