# SPDX-License-Identifier: Apache-2.0
"""The blocks that a hybrid's pattern always shows, built on the host once per pattern and grid."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import EMPTY, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.layout.masks import causal_masks
from dynaxx.patterns.base import Pattern


class Static(NamedTuple):
    """The blocks of a pattern. All tensors are on the host."""

    layout: BlockLayout | None  # shared by all heads; None without a pattern
    mask_ids: Tensor  # (nnz,) int64 mask id of each entry in `masks`
    same_as_causal: Tensor  # (len(masks) | 1,) int64 index of the causal mask that equals each mask, or EMPTY
    masks: ElementMasks  # the causal masks, then the pattern's
    counts: Tensor  # (q_blocks,) int64 number of blocks per row


@LayoutCache
@on_host
def static_part(pattern: Pattern | None, grid: BlockGrid) -> Static:
    """Return the blocks of `pattern` on `grid`, none if it is None. Cached by value."""
    causal = causal_masks(grid)
    none = torch.zeros(0, dtype=torch.int64)
    if pattern is None:
        return Static(None, none, none.new_full((1,), EMPTY), causal, none.new_zeros(grid.q_blocks))
    layout = pattern.layout(grid.seqlen_q, grid.seqlen_k, causal=grid.causal, block_size=grid.block_size)
    masks = causal.append(layout.masks)
    equal = (masks.bits[:, None] == causal.bits[None]).flatten(2).all(-1)  # (masks, causal masks)
    same = none.new_full((max(1, len(masks)),), EMPTY)
    which, twin = equal.nonzero(as_tuple=True)
    same[which] = twin
    mask_ids = layout.kv_masks[: layout.nnz].long()
    mask_ids = torch.where(mask_ids >= 0, mask_ids + len(causal), mask_ids)
    return Static(layout, mask_ids, same, masks, layout.kv_num_blocks[0, 0].long())
