# SPDX-License-Identifier: Apache-2.0
"""`hide_keys`: remove keys, such as padding, from a layout, separately for each sequence of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import refuse_recording
from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.host import lasting
from dynaxx.layout.masks import EMPTY, ElementMasks
from dynaxx.layout.packed import PackedLayout


@typed
@lasting
def hide_keys(layout: BlockLayout, visible: Tensor) -> BlockLayout:
    """Hide keys, such as padding, from every query. O(visited blocks x batch).

    The layout itself is returned if no key is hidden. Its rule still counts positions from the first key, padding
    included.

    Args:
        layout: a layout that the batch shares, or one per batch entry; not packed.
        visible: (batch, seqlen_k) bool; False hides the key, True leaves the layout unchanged.

    Returns:
        A layout that the batch shares if it did before and all rows of `visible` are equal, else one per entry. It
        does not visit blocks whose keys are all hidden. Reads back from the device.

    Raises:
        TypeError: `layout` is not a layout.
        ValueError: `layout` is packed or for another batch, or `visible` has another shape or dtype.
    """
    refuse_recording("`hide_keys`")
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"`layout` must be a BlockLayout, got {type(layout).__name__}; make one with pattern.layout")
    if isinstance(layout, PackedLayout):
        raise ValueError("`layout` must not be packed: packed sequences have no padding; leave hidden keys out")
    if visible.dtype != torch.bool or visible.ndim != 2 or visible.shape[1] != layout.seqlen_k:
        raise ValueError(
            f"`visible` must be bool (batch, seqlen_k = {layout.seqlen_k}), got {visible.dtype} {tuple(visible.shape)}"
        )
    if layout.layout_batch not in (1, len(visible)):
        raise ValueError(f"`visible` must be for batch {layout.layout_batch}, as `layout` is, got {len(visible)}")
    visible = visible.to(layout.device)
    if layout.layout_batch == 1 and bool((visible == visible[:1]).all()):
        visible = visible[:1]
    if bool(visible.all()):
        return layout
    flat_rows, cols, mask_ids = layout.entries()
    kind, tiles = _key_tiles(visible, layout)
    batch, rows = len(visible), layout.layout_heads * layout.q_blocks
    if layout.layout_batch == 1:
        shift = torch.arange(batch, device=layout.device)[:, None] * rows
        flat_rows, cols, mask_ids = (flat_rows + shift).flatten(), cols.repeat(batch), mask_ids.repeat(batch)
    tile = kind[flat_rows // max(1, rows), cols]
    kept = tiles.any(-1)[tile]
    flat_rows, cols, mask_ids, tile = flat_rows[kept], cols[kept], mask_ids[kept], tile[kept]
    masks, mask_ids = _cut_masks(layout, mask_ids, tile, tiles)
    return BlockLayout.from_entries(
        layout.grid(), flat_rows, cols, mask_ids, masks, layout_batch=batch, layout_heads=layout.layout_heads
    )


def _key_tiles(visible: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Return each block's entry in a table of key visibilities, (batch, kv_blocks), and the table, (n, kv_block) bool.

    Keys beyond the sequence count as visible, as in full blocks, unless all keys of the block are hidden.
    """
    kv_block = layout.block_size[1]
    shape, beyond = (len(visible), layout.kv_blocks, kv_block), (0, layout.kv_blocks * kv_block - layout.seqlen_k)
    some = torch.nn.functional.pad(visible, beyond, value=False).view(shape).any(-1, keepdim=True)
    padded = torch.nn.functional.pad(visible, beyond, value=True).view(shape) & some
    tiles, kind = padded.flatten(0, 1).unique(dim=0, return_inverse=True)
    return kind.view(shape[:2]), tiles


def _cut_masks(layout: BlockLayout, mask_ids: Tensor, tile: Tensor, tiles: Tensor) -> tuple[ElementMasks, Tensor]:
    """Combine element masks with hidden keys: return the extended mask table and the new mask id of each block."""
    whole = tiles.all(-1)[tile]
    pair = (mask_ids + 1) * len(tiles) + tile
    pairs, entry = pair[~whole].unique(return_inverse=True)
    table = layout.masks.to_dense()
    table = torch.cat([table.new_ones(1, *layout.block_size), table])  # id FULL = -1 comes first
    cut = table[pairs // len(tiles)] & tiles[pairs % len(tiles), None]
    masks = layout.masks.append(ElementMasks.from_dense(cut))
    own_ids = torch.arange(len(cut), device=cut.device) + len(layout.masks)
    own_ids = torch.where(cut.flatten(1).any(1), own_ids, EMPTY)
    mask_ids = mask_ids.clone()
    mask_ids[~whole] = own_ids[entry]
    return masks, mask_ids
