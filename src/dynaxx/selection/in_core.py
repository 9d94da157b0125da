# SPDX-License-Identifier: Apache-2.0
"""Choose blocks on a CPU in the compiled core: scores, ranks and lists. The choice equals that of torch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynaxx.kernels.selection.cpu import best_blocks
from dynaxx.layout import FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.layout.masks import causal_mask_ids
from dynaxx.patterns.base import Pattern
from dynaxx.selection.choice import Choice, ChoiceSettings, count_heads_per_choice
from dynaxx.selection.static import static_part

BITS_PER_BYTE = 8


def serves(q: Tensor, k: Tensor, grid: BlockGrid, selector: Choice, memory_budget: int) -> bool:
    """Return whether the core can make this choice: the best of blocks by mean queries."""
    tiles = selector.scorer.mean_query_tiles(grid.block_size[0])
    if tiles is None or grid.block_size[0] // tiles.size > best_blocks.MAX_TILES or not grid.kv_blocks:
        return False
    if not best_blocks.serves(q, k) or q.stride(-1) != 1 or k.stride(-1) != 1 or not q.numel():
        return False
    if not selector.only_ranks:
        return False
    held = 2 * q.shape[0] * q.shape[2] * grid.q_blocks * grid.kv_blocks  # bits of choices, and of optional blocks
    choice = selector.choice(q.shape[2])
    return choice is not None and choice.mode == "top_k" and held <= BITS_PER_BYTE * memory_budget


def select_in_core(
    q: Tensor, k: Tensor, pattern: Pattern | None, selector: Choice, grid: BlockGrid, scale: float
) -> BlockLayout:
    """Choose blocks as `select_blocks` does. `serves` must have accepted the inputs."""
    tiles, choice = selector.scorer.mean_query_tiles(grid.block_size[0]), selector.choice(q.shape[2])
    assert tiles is not None, "`serves` asked before"
    assert choice is not None, "`serves` asked before"
    given, counts = _given(pattern, grid), _counts(choice, grid, q.shape[2])
    factor = scale * tiles.sharpness * math.log2(math.e)
    together = count_heads_per_choice(selector, q.shape[2], k.shape[2]) > 1
    chosen = best_blocks.best_blocks(q.detach(), k.detach(), counts, given.optional, grid, tiles.size, factor, together)
    listed = best_blocks.listed_blocks(chosen, given.entries, grid)
    return BlockLayout(grid.seqlen_q, grid.seqlen_k, grid.block_size, *listed, given.masks)


class _Given(NamedTuple):
    """The part of a pattern on a grid that a choice of blocks reads."""

    optional: Tensor  # (R, W) int32 bits of the blocks to choose from: visible, and not shown entirely by the pattern
    entries: tuple[Tensor, Tensor, Tensor] | None  # the pattern's blocks: offsets, indices and mask ids, int32
    masks: ElementMasks


@lru_cache(maxsize=16)
@on_host
def _given(pattern: Pattern | None, grid: BlockGrid) -> _Given:
    part = static_part(pattern, grid)
    visible = grid.causal_kv_blocks(grid.rows())
    optional = torch.arange(grid.kv_blocks) < visible[:, None]
    entries = None
    if part.layout is not None:
        rows, cols = part.layout.entries()[:2]
        own = causal_mask_ids(grid, rows, cols)
        same = (part.mask_ids == FULL) | (
            (part.mask_ids >= 0) & (part.same_as_causal[part.mask_ids.clamp(min=0)] == own)
        )
        optional[rows[same], cols[same]] = False
        entries = part.layout.kv_indptr[0, 0].contiguous(), cols.int(), part.mask_ids.int()
    return _Given(_packed(optional), entries, part.masks)


def _packed(flags: Tensor) -> Tensor:
    """Pack (R, C) bool into (R, ceil(C / 32)) int32."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[1] % 32)).numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@LayoutCache
@on_host
def _counts(choice: ChoiceSettings, grid: BlockGrid, q_heads: int) -> Tensor:
    """Return (Hq, R) int32 numbers of blocks that each row takes, as `TopK.choose` has them."""
    visible = grid.causal_kv_blocks(grid.rows())
    seen = visible.clamp(min=choice.floor)
    rows = []
    for amount in choice.amounts:
        count = (seen.float() * amount).ceil().long() if choice.shares else torch.full_like(seen, int(amount))
        rows.append(torch.where(count >= visible, best_blocks.ALL, count).int())
    return torch.stack(rows).expand(q_heads, -1).contiguous()
