# SPDX-License-Identifier: Apache-2.0
"""Conversion between `BlockLayout` and FlexAttention's `BlockMask`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed
from dynaxx.derivatives import refuse_recording
from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.dense import unique_masks
from dynaxx.layout.grid import BlockGrid, as_block_size
from dynaxx.layout.host import lasting, never_traced, on_host, without_gradient
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def block_mask_ids(layout: BlockLayout) -> Tensor:
    """Return each block's mask id, (layout_batch, layout_heads, q_blocks, kv_blocks) int64; EMPTY if not visited."""
    flat_rows, cols, mask_ids = layout.entries()
    table = torch.full(
        (layout.layout_batch * layout.layout_heads * layout.q_blocks, layout.kv_blocks),
        EMPTY,
        device=layout.device,
        dtype=torch.int64,
    )
    table[flat_rows, cols] = mask_ids
    return table.view(layout.layout_batch, layout.layout_heads, layout.q_blocks, layout.kv_blocks)


@never_traced
@typed
def to_block_mask(layout: BlockLayout) -> BlockMask:
    """Return FlexAttention's `BlockMask` for a layout. Its `mask_mod` reads the element masks of the layout."""
    from torch.nn.attention.flex_attention import BlockMask

    mask_ids = block_mask_ids(layout)
    bits = layout.masks.bits
    bits = torch.cat([bits, torch.full_like(bits[:1], -1) if len(bits) else bits.new_full((1, *bits.shape[1:]), -1)])
    q_block, kv_block = layout.block_size
    shared_batch, shared_heads = layout.layout_batch == 1, layout.layout_heads == 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        mask_id = mask_ids[
            b * 0 if shared_batch else b, h * 0 if shared_heads else h, q_idx // q_block, kv_idx // kv_block
        ]
        column = kv_idx % kv_block
        word = bits[torch.where(mask_id < 0, bits.shape[0] - 1, mask_id), q_idx % q_block, column // 32]
        return (mask_id != EMPTY) & ((word >> (column % 32)) & 1).bool()

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return chosen.sum(-1).to(torch.int32), order

    return BlockMask.from_kv_blocks(
        *listed(mask_ids >= 0),
        *listed(mask_ids == FULL),
        BLOCK_SIZE=layout.block_size,
        mask_mod=mask_mod,
        seq_lengths=(layout.seqlen_q, layout.seqlen_k),
    )


@never_traced
@typed
def from_block_mask(block_mask: BlockMask, *, chunk: int = 1024) -> BlockLayout:
    """Return the `BlockLayout` of FlexAttention's `BlockMask`.

    Args:
        block_mask: the mask to convert. Its `mask_mod` runs on partial blocks only, mapped over single indices as in
            FlexAttention's `create_mask`.
        chunk: number of partial blocks that one call of `mask_mod` covers.

    Raises:
        TypeError: `block_mask` is not a BlockMask, or its `mask_mod` does not return a bool.
        ValueError: the block size is not supported, or `chunk` is below 1.
    """
    refuse_recording("`from_block_mask`")
    chunk = as_integer("chunk", chunk)
    if chunk < 1:
        raise ValueError(f"`chunk` must be >= 1, got {chunk}")
    if not hasattr(block_mask, "BLOCK_SIZE"):
        raise TypeError(f"`block_mask` must be a BlockMask of torch's flex_attention, got {type(block_mask).__name__}")
    q_block, kv_block = block_mask.BLOCK_SIZE
    block_size = as_block_size((q_block, kv_block))
    seqlen_q, seqlen_k = block_mask.seq_lengths
    grid = BlockGrid(seqlen_q, seqlen_k, block_size, causal=False)
    batch, heads, q_blocks = block_mask.kv_num_blocks.shape
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    num, indices, full_num, full_indices = (without_gradient(getattr(block_mask, name)) for name in names)
    flat_rows, cols = _listed(num, indices)
    r, c = (torch.arange(size, device=flat_rows.device) for size in block_size)
    bits = [torch.zeros(0, *block_size, dtype=torch.bool, device=flat_rows.device)]
    for some, col in zip(flat_rows.split(chunk), cols.split(chunk), strict=True):
        if not len(some):  # `split` gives one part of nothing
            break
        row, head, b = some % q_blocks, some // q_blocks % heads, some // q_blocks // heads
        q_idx, kv_idx = row[:, None] * block_size[0] + r, col[:, None] * block_size[1] + c
        seen = _visible(block_mask, b, head, q_idx.clamp(max=seqlen_q - 1), kv_idx.clamp(max=seqlen_k - 1))
        bits.append(seen & (q_idx < seqlen_q)[:, :, None] & (kv_idx < seqlen_k)[:, None])
    full = (flat_rows[:0], cols[:0]) if full_num is None else _listed(full_num, full_indices)
    return _of_blocks(grid, batch, heads, flat_rows, cols, torch.cat(bits), *full)


@on_host
def _listed(num: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat row and the kv block of each entry of a BlockMask's lists, (n,) int64."""
    listed = torch.arange(indices.shape[-1], device=num.device) < num[..., None]
    flat_rows, slot = listed.flatten(0, 2).nonzero(as_tuple=True)
    return flat_rows, indices.flatten(0, 2)[flat_rows, slot].long()


@lasting
def _of_blocks(
    grid: BlockGrid, batch: int, heads: int, flat_rows: Tensor, cols: Tensor, seen: Tensor, full_rows: Tensor,
    full_cols: Tensor,
) -> BlockLayout:  # fmt: skip
    """Build a layout from partial blocks, with their pairs (n, q_block, kv_block) bool, and from full blocks."""
    masks, mask_ids = unique_masks(ElementMasks.from_dense(seen))
    if len(masks):
        empty = (masks.bits == 0).all(-1).all(-1)
        mask_ids = torch.where(empty[mask_ids], EMPTY, mask_ids)
    rows, cols = torch.cat([flat_rows, full_rows]), torch.cat([cols, full_cols])
    mask_ids = torch.cat([mask_ids, torch.full_like(full_rows, FULL)])
    return BlockLayout.from_entries(grid, rows, cols, mask_ids, masks, layout_batch=batch, layout_heads=heads)


def _visible(block_mask: BlockMask, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return what `mask_mod` says of the pairs of n blocks, (n, q_block, kv_block) bool.

    A mask function is written for single indices: it may index a tensor with one of them, and reduce the result. b and
    h are (n,), q_idx (n, q_block), kv_idx (n, kv_block).
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    each_key = torch.vmap(block_mask.mask_mod, (None, None, None, 0))
    each_query = torch.vmap(each_key, (None, None, 0, None))
    with TransformGetItemToIndex():  # indexing by an index that is mapped over, `mask[b]`, would read its value
        seen: Tensor = torch.vmap(each_query)(b, h, q_idx, kv_idx)
    if seen.dtype != torch.bool or seen.shape != (*q_idx.shape, kv_idx.shape[1]):
        raise TypeError(
            f"`mask_mod` of `block_mask` must return one bool for each pair, got {seen.dtype} of shape "
            f"{tuple(seen.shape[3:])}"
        )
    return seen
