# SPDX-License-Identifier: Apache-2.0
"""`Entries`: lists of visited blocks, built from block indices or layouts and sorted into the tensors of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import as_integer
from dynaxx.layout.fields import LayoutFields
from dynaxx.layout.grid import BlockGrid
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks, causal_mask_ids, causal_masks


class Entries(NamedTuple):
    """Visited blocks in any order, and the element masks that their mask_ids refer to."""

    flat_rows: Tensor  # (n,) int64, flat row `(b * layout_heads + h) * q_blocks + i`
    cols: Tensor  # (n,) int64, kv block
    mask_ids: Tensor  # (n,) int64, index into `masks` or FULL; entries with EMPTY are dropped
    masks: ElementMasks
    layout_batch: int = 1
    layout_heads: int = 1


class SortedEntries(NamedTuple):
    """The tensors of a `BlockLayout`, in the order of its fields."""

    kv_indptr: Tensor
    kv_num_partial: Tensor
    kv_indices: Tensor
    kv_masks: Tensor
    masks: ElementMasks


def sorted_entries(grid: BlockGrid, entries: Entries) -> SortedEntries:
    """Sort visited blocks by row; within a row, partial blocks come first, and indices ascend in both parts."""
    kept = entries.mask_ids != EMPTY
    flat_rows, cols, mask_ids = entries.flat_rows[kept], entries.cols[kept], entries.mask_ids[kept]
    full = (mask_ids == FULL).long()
    order = ((flat_rows * 2 + full) * max(1, grid.kv_blocks) + cols).argsort()
    shape = (entries.layout_batch, entries.layout_heads, grid.q_blocks)
    num_rows = prod(shape)
    counts = torch.bincount(flat_rows, minlength=num_rows)
    partial = torch.bincount(flat_rows, weights=(1 - full).float(), minlength=num_rows) if flat_rows.numel() else counts
    return SortedEntries(
        kv_indptr=row_offsets(counts.view(shape)),
        kv_num_partial=partial.view(shape).to(torch.int32),
        kv_indices=cols[order].to(torch.int32),
        kv_masks=mask_ids[order].to(torch.int32),
        masks=entries.masks.to(flat_rows.device),
    )


def row_offsets(counts: Tensor) -> Tensor:
    """Convert (b, h, n) counts to (b, h, n + 1) int32 absolute offsets that continue from one head to the next."""
    return running_sum(torch.nn.functional.pad(counts, (1, 0)))


def running_sum(counts: Tensor) -> Tensor:
    """Return `row_offsets` of counts that already start with a 0 for each head, (b, h, 1 + n)."""
    return counts.flatten().cumsum(0, dtype=torch.int32).view(counts.shape)


def check_block_indices(block_indices: Tensor, grid: BlockGrid) -> None:
    """Check the type and shape of block indices, not their values; raises like `BlockLayout.from_block_indices`."""
    if not isinstance(block_indices, Tensor):
        raise TypeError(f"`block_indices` must be a tensor, got {type(block_indices).__name__}")
    if block_indices.ndim != 4 or block_indices.shape[2] != grid.q_blocks:
        raise ValueError(
            f"`block_indices` must be (batch | 1, q_heads | 1, q_blocks = {grid.q_blocks}, slots), "
            f"got {tuple(block_indices.shape)}"
        )
    if block_indices.is_floating_point() or block_indices.dtype == torch.bool:
        raise TypeError(f"`block_indices` must be integers, got {block_indices.dtype}")


def entries_of_block_indices(block_indices: Tensor, grid: BlockGrid) -> Entries:
    """Check the values of block indices and list the blocks they name; see `BlockLayout.from_block_indices`."""
    block_indices = block_indices.long()  # comparisons with -1 need a signed dtype
    wrong = (block_indices < -1) | (block_indices >= grid.kv_blocks)
    if wrong.any():
        raise ValueError(
            f"`block_indices` must be -1 or in [0, kv_blocks = {grid.kv_blocks}), got {block_indices[wrong][0].item()}"
        )
    if has_duplicates(block_indices):
        raise ValueError("`block_indices` must not name a block twice in one row; drop duplicates or set them to -1")
    batch, heads = block_indices.shape[:2]
    flat_rows, slot = (block_indices.flatten(0, 2) >= 0).nonzero(as_tuple=True)
    cols = block_indices.flatten(0, 2)[flat_rows, slot].long()
    mask_ids = causal_mask_ids(grid, flat_rows % max(1, grid.q_blocks), cols)
    return Entries(flat_rows, cols, mask_ids, causal_masks(grid), batch, heads)


def has_duplicates(block_indices: Tensor) -> bool:
    """Return whether a row of (..., slots) block indices names a block twice; empty slots (-1) do not count."""
    ordered = block_indices.sort(-1).values
    return bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


def stacked_entries(layouts: Sequence[LayoutFields], along: str) -> Entries:
    """Check layouts and concatenate their visited blocks along "heads" or "batch"; see `BlockLayout.stack_heads`."""
    if not layouts:
        raise ValueError("`layouts` must contain at least one layout")
    first = layouts[0]
    for other in layouts:
        if other.device != first.device:
            raise ValueError(f"`layouts` must be on one device, got {first.device} and {other.device}")
        kept = "layout_batch" if along == "heads" else "layout_heads"
        names = ("seqlen_q", "seqlen_k", "block_size", kept)
        wanted, got = (tuple(getattr(each, name) for name in names) for each in (first, other))
        if got != wanted:
            raise ValueError(f"`layouts` must agree in ({', '.join(names)}), got {wanted} and {got}")
    starts = [0, *accumulate(layout.layout_heads if along == "heads" else layout.layout_batch for layout in layouts)]
    q_blocks = max(1, first.q_blocks)
    if along == "batch":
        rows = first.layout_heads * q_blocks
        joined = joined_entries(layouts, lambda index, flat_rows: flat_rows + starts[index] * rows)
        return Entries(*joined, starts[-1], first.layout_heads)
    heads = starts[-1]

    def map_rows(index: int, flat_rows: Tensor) -> Tensor:
        own_heads = layouts[index].layout_heads
        batch, head = flat_rows // q_blocks // own_heads, flat_rows // q_blocks % own_heads + starts[index]
        return (batch * heads + head) * q_blocks + flat_rows % q_blocks

    return Entries(*joined_entries(layouts, map_rows), first.layout_batch, heads)


def joined_entries(
    layouts: Sequence[LayoutFields], map_rows: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, ElementMasks]:
    """Concatenate the visited blocks of layouts and their mask tables.

    Args:
        layouts: layouts of one block size and device, at least one.
        map_rows: function (index, flat_rows) that maps flat rows of `layouts[index]` to rows of the joined layout.

    Returns:
        (flat_rows, cols, mask_ids, masks), as in `Entries`.
    """
    masks, joined_rows, joined_cols, joined_ids = layouts[0].masks, [], [], []
    for index, layout in enumerate(layouts):
        offset = 0
        if index:
            offset, masks = len(masks), masks.append(layout.masks)
        flat_rows, cols, mask_ids = layout.entries()
        joined_rows.append(map_rows(index, flat_rows))
        joined_cols.append(cols)
        joined_ids.append(torch.where(mask_ids >= 0, mask_ids + offset, mask_ids))
    return torch.cat(joined_rows), torch.cat(joined_cols), torch.cat(joined_ids), masks


def entries_of_heads(layout: LayoutFields, heads: Sequence[int]) -> Entries:
    """List the visited blocks of the given heads; see `BlockLayout.head_slice`."""
    heads = [as_integer("heads", head) for head in heads]
    if len(set(heads)) < len(heads) or not all(0 <= head < layout.layout_heads for head in heads) or not heads:
        raise ValueError(f"`heads` must be distinct heads from 0 to {layout.layout_heads - 1}, got {heads}")
    flat_rows, cols, mask_ids = layout.entries()
    new_index = torch.full((layout.layout_heads,), -1, device=layout.device, dtype=torch.int64)
    new_index[torch.tensor(list(heads), device=layout.device, dtype=torch.int64)] = torch.arange(
        len(heads), device=layout.device
    )
    head, row = flat_rows // layout.q_blocks, flat_rows % layout.q_blocks
    batch, head = head // layout.layout_heads, new_index[head % layout.layout_heads]
    kept = head >= 0
    flat_rows = (batch * len(heads) + head) * layout.q_blocks + row
    return Entries(flat_rows[kept], cols[kept], mask_ids[kept], layout.masks, layout.layout_batch, len(heads))
