# SPDX-License-Identifier: Apache-2.0
"""The indexer's choice in a decoding step, in torch: few queries, so that their scores fit into memory.

Nothing here reads a value on the host. A compiler traces it, and a CUDA graph captures it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.trained.tokens.kernels.reference.indexer import index_scores

HIDDEN = torch.iinfo(torch.int64).min


def rows_of_pages(pages: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of each sequence (batch, max_pages * page_size, dim), and which of them have a page."""
    rows = pages[page_table.clamp(min=0)].flatten(1, 2)
    return rows, (page_table >= 0).repeat_interleave(pages.shape[1], 1)


def best_blocks(
    q: Tensor, k: Tensor, weights: Tensor, k_scale: Tensor | None, visible: Tensor, block_size: int, slots: int
) -> Tensor:
    """Return the best blocks of each query, (batch, t, 1, slots) int32, ascending, -1 behind.

    Args:
        q: (batch, t, heads, dim).
        k: (batch, M, dim).
        weights: (batch, t, heads).
        k_scale: (batch, M), or None.
        visible: (batch, t, M).
        block_size: keys per block; a block's score is that of its best visible key.
        slots: blocks to choose; of equal scores the earlier block wins.
    """
    scores = torch.vmap(index_scores)(q, k, weights)
    if k_scale is not None:
        scores = scores * k_scale[:, None]
    blocks = -(-k.shape[1] // block_size)
    bits = (scores.float() + 0.0).view(torch.int32)
    order = torch.where(visible, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long(), HIDDEN >> 31)
    order = torch.nn.functional.pad(order, (0, blocks * block_size - k.shape[1]), value=HIDDEN >> 31)
    order = order.unflatten(2, (blocks, block_size)).amax(3)
    earliness = blocks - 1 - torch.arange(blocks, device=q.device)
    best = ((order << 31) | earliness).topk(min(slots, blocks), sorted=False).values
    found = torch.where(best >> 31 == HIDDEN >> 31, blocks, blocks - 1 - (best & 0x7FFFFFFF)).sort(2).values
    found = torch.where(found < blocks, found, -1).int()
    return torch.nn.functional.pad(found, (0, slots - found.shape[2]), value=-1)[:, :, None]
