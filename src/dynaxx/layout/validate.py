"""Whether the values of a layout are what kernels may trust."""

from __future__ import annotations

import torch

from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.masks import FULL


def check_values(layout: BlockLayout) -> None:
    """See `BlockLayout.validate`."""
    if layout.q_blocks == 0:
        return
    starts = layout.kv_indptr.flatten(0, 1)
    if int(starts[0, 0]) != 0 or (starts.diff(dim=-1) < 0).any() or (starts[1:, 0] != starts[:-1, -1]).any():
        raise ValueError("`kv_indptr` must start at 0, not fall, and go on from one head to the next")
    if layout.nnz > layout.kv_indices.numel():
        raise ValueError(f"`kv_indptr` must end within `kv_indices`, got {layout.nnz} > {layout.kv_indices.numel()}")
    if ((layout.kv_num_partial < 0) | (layout.kv_num_partial > layout.kv_num_blocks)).any():
        raise ValueError("`kv_num_partial` must lie between 0 and the row's number of blocks")
    lead, cols, codes = layout.entries()
    if cols.numel() and not 0 <= int(cols.amin()) <= int(cols.amax()) < layout.kv_blocks:
        raise ValueError(
            f"`kv_indices` must be in [0, kv_blocks = {layout.kv_blocks}), got {int(cols.amin())} to {int(cols.amax())}"
        )
    position = torch.arange(cols.numel(), device=layout.device) - layout.kv_indptr[..., :-1].flatten()[lead]
    partial = position < layout.kv_num_partial.flatten()[lead]
    if not torch.where(partial, (codes >= 0) & (codes < len(layout.masks)), codes == FULL).all():
        raise ValueError(f"`kv_masks` must be -1 for full blocks and in [0, {len(layout.masks)}) for partial ones")
    visited = (lead * layout.kv_blocks + cols).sort().values
    if (visited[1:] == visited[:-1]).any():
        raise ValueError("`kv_indices` must not name a block twice in one row")
