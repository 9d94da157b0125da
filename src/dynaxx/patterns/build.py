"""From a pattern to a layout: list the candidates, classify them, and evaluate each distinct partial mask once."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.layout import EMPTY, FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.convert import unique_masks
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.local import Causal

MASKS_AT_ONCE = 512


def build_layout(pattern: Pattern, grid: BlockGrid) -> BlockLayout:
    """The layout of `pattern` on `grid`, on the CPU, shared by all heads."""
    rule = pattern & Causal() if grid.causal else pattern
    flat = rule.candidates(grid)
    rows, cols = flat // max(1, grid.kv_blocks), flat % max(1, grid.kv_blocks)
    states = rule.classify(grid, rows, cols)
    codes = torch.where(states.full, FULL, EMPTY)
    masks, codes[states.partial] = _partial_masks(
        rule, grid, rows[states.partial], cols[states.partial], states.key[states.partial]
    )
    return BlockLayout.from_entries(grid, rows, cols, codes, masks)


def _partial_masks(
    rule: Pattern, grid: BlockGrid, rows: Tensor, cols: Tensor, key: Tensor
) -> tuple[ElementMasks, Tensor]:
    """The table of masks, and each partial block's code: FULL or EMPTY where its mask is all set or all clear."""
    q_block, kv_block = grid.block_size
    _, kind = key.unique(return_inverse=True)
    kinds = int(kind.amax()) + 1 if kind.numel() else 0
    example = torch.empty(kinds, dtype=torch.int64).scatter_(0, kind, torch.arange(len(kind)))
    r, c = torch.arange(q_block)[:, None], torch.arange(kv_block)
    packed = ElementMasks.empty(grid.block_size)
    codes = []
    for some in example.split(MASKS_AT_ONCE):
        q_pos = rows[some][:, None, None] * q_block + r + grid.offset
        k_pos = cols[some][:, None, None] * kv_block + c
        tiles = rule.visible(grid, q_pos, k_pos).expand(len(some), q_block, kv_block)
        all_set, none_set = tiles.flatten(1).all(1), ~tiles.flatten(1).any(1)
        table, entry = unique_masks(tiles[~all_set & ~none_set])
        code = torch.where(all_set, FULL, EMPTY)
        code[~all_set & ~none_set] = entry + len(packed)
        packed = packed.append(table)
        codes.append(code)
    return packed, torch.cat([*codes, kind.new_zeros(0)])[kind]
