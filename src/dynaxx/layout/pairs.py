# SPDX-License-Identifier: Apache-2.0
"""How many pairs a layout shows."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.masks import FULL


def visible_pairs(layout: BlockLayout) -> Tensor:
    """See `BlockLayout.visible_pairs`."""
    lead, cols, codes = layout.entries()
    q_block, kv_block = layout.block_size
    rows = lead % layout.q_blocks if layout.q_blocks else lead
    height = (layout.seqlen_q - rows * q_block).clamp(max=q_block)
    width = (layout.seqlen_k - cols * kv_block).clamp(max=kv_block)
    dense = layout.masks.to_dense()
    pairs = height * width
    partial = codes != FULL
    whole = (height == q_block) & (width == kv_block)
    if len(layout.masks):
        counts = dense.sum((1, 2))
        pairs = torch.where(partial, counts[codes.clamp(min=0)], pairs)
        for entry in (partial & ~whole).nonzero().flatten().tolist():
            h, w = int(height[entry]), int(width[entry])
            pairs[entry] = dense[codes[entry], :h, :w].sum()
    heads = lead // max(1, layout.q_blocks)
    total = torch.zeros(layout.layout_batch * layout.layout_heads, dtype=torch.int64, device=layout.device)
    return total.index_add_(0, heads, pairs).view(layout.layout_batch, layout.layout_heads)
