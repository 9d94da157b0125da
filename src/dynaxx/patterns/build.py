"""From a pattern to a layout: runs of blocks, the partial ones classified, and each distinct mask evaluated once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dynaxx.layout import EMPTY, FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.block_layout import row_offsets
from dynaxx.layout.convert import unique_masks
from dynaxx.layout.grid import _spans
from dynaxx.patterns.base import Pattern, _cached_layout
from dynaxx.patterns.fixed import _drawn
from dynaxx.patterns.local import Causal
from dynaxx.patterns.runs import Runs, beside, without

MASKS_AT_ONCE = 512
MOST_MASKS = 4096  # kept per rule
TABLE = 1 << 13  # places for kinds of masks; a collision costs another try
SPREAD = (0x9E3779B97F4A7C15 - (1 << 64), 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D)  # odd multipliers


def build_layout(pattern: Pattern, grid: BlockGrid) -> BlockLayout:
    """The layout of `pattern` on `grid`, on the CPU, shared by all heads."""
    rule = pattern & Causal() if grid.causal and not pattern.hides_future(grid) else pattern
    touched, filled = rule.visited(grid)
    partial = without(touched, filled)
    rows, cols = partial.blocks(grid.q_blocks)
    masks, codes = _element_masks(rule, grid, rows, cols)
    if bool((codes >= 0).all()):
        return _layout_of_runs(grid, partial, filled, rows, codes, masks)
    full_rows, full_cols = filled.blocks(grid.q_blocks)
    codes = torch.cat([codes, torch.full_like(full_rows, FULL)])
    return BlockLayout.from_entries(grid, torch.cat([rows, full_rows]), torch.cat([cols, full_cols]), codes, masks)


def _layout_of_runs(
    grid: BlockGrid, partial: Runs, filled: Runs, rows: Tensor, codes: Tensor, masks: ElementMasks
) -> BlockLayout:
    """The layout whose entries are in order as they are: of each row its partial blocks, then its full ones."""
    num_partial, num_full = partial.lengths(grid.q_blocks), filled.lengths(grid.q_blocks)
    indptr = row_offsets((num_partial + num_full).view(1, 1, -1))
    indices = beside(partial, filled).columns(grid.q_blocks).to(torch.int32)
    entry_masks = torch.full_like(indices, FULL)
    full_before = num_full.cumsum(0) - num_full
    entry_masks[full_before[rows] + torch.arange(len(rows))] = codes.to(torch.int32)
    return BlockLayout(
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.seqlen_k,
        block_size=grid.block_size,
        kv_indptr=indptr,
        kv_num_partial=num_partial.to(torch.int32).view(1, 1, -1),
        kv_indices=indices,
        kv_masks=entry_masks,
        masks=masks,
    )


def _element_masks(rule: Pattern, grid: BlockGrid, rows: Tensor, cols: Tensor) -> tuple[ElementMasks, Tensor]:
    """The table of masks, and each block's code: FULL or EMPTY where its mask is all set or all clear."""
    kv_block = grid.block_size[1]
    if not len(rows):
        return ElementMasks.empty(grid.block_size), rows
    keys = rule.classify(grid, rows, cols).keys()
    example, kind = _kinds(keys)
    masks = _masks_of(rule, grid, rows[example], cols[example], keys.index_select(1, example))
    all_set = (masks.bits == (-1 if kv_block >= 32 else (1 << kv_block) - 1)).flatten(1).all(1)
    cut = (masks.bits != 0).flatten(1).any(1) & ~all_set
    if bool(cut.all()):
        table, code = unique_masks(masks)
    else:
        table, entry = unique_masks(masks.some(cut))
        code = torch.where(all_set, FULL, EMPTY).masked_scatter_(cut, entry)
    return table, code[kind]


def _masks_of(rule: Pattern, grid: BlockGrid, rows: Tensor, cols: Tensor, keys: Tensor) -> ElementMasks:
    """The masks of some blocks; where a key was met before, at this length or another, nothing is evaluated."""
    known = _known_masks(rule, grid.block_size, grid.causal)
    names = [tuple(key) for key in keys.T.tolist()]
    missing = [i for i, name in enumerate(names) if name not in known]
    r, c = (torch.arange(size) for size in grid.block_size)
    found = dict(known) if missing else known
    for some in torch.tensor(missing).split(MASKS_AT_ONCE) if missing else ():
        q_pos = rows[some][:, None, None] * grid.block_size[0] + r[:, None] + grid.offset
        k_pos = cols[some][:, None, None] * grid.block_size[1] + c
        packed = ElementMasks.from_dense(rule.visible(grid, q_pos, k_pos).expand(len(some), *grid.block_size))
        for i, bits, band in zip(some.tolist(), packed.bits, packed.bands, strict=True):
            found[names[i]] = bits, band
    if len(found) <= MOST_MASKS:
        known.update(found)
    bits, bands = (torch.stack(parts) for parts in zip(*(found[name] for name in names), strict=True))
    return ElementMasks(bits, bands, grid.block_size[1])


@lru_cache(maxsize=64)
def _known_masks(
    rule: Pattern, block_size: tuple[int, int], causal: bool
) -> dict[tuple[int, ...], tuple[Tensor, Tensor]]:
    """Bits and band of masks of a rule by their keys, filled by `_masks_of`."""
    return {}


def _kinds(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct columns of (c, n) int64: (kinds,) an example of each, and (n,) the kind of each column.

    By a table of places and not by sorting; columns that share a place are compared.
    """
    each = torch.arange(keys.shape[1])
    number = torch.empty(TABLE, dtype=torch.int64)
    for factor in SPREAD:
        mixed = keys[0]
        for row in keys[1:]:
            mixed = (mixed * factor) ^ (mixed >> 29) ^ row
        place = ((mixed * factor) >> 40) & (TABLE - 1)
        chosen = number.scatter_(0, place, each).gather(0, place)
        if torch.equal(keys.index_select(1, chosen), keys):
            taken = torch.zeros(TABLE, dtype=torch.bool).index_fill_(0, place, True).nonzero().flatten()
            example = number.gather(0, taken)
            return example, number.scatter_(0, taken, each[: len(taken)]).gather(0, place)
    _, kind = keys.unique(dim=1, return_inverse=True)
    return torch.empty(int(kind.amax()) + 1, dtype=torch.int64).scatter_(0, kind, each), kind


def forget(masks: bool = True) -> None:
    """Drop the layouts that are kept, what grids keep for them and, if asked, masks; for measurements."""
    for cache in (_cached_layout, _spans, _drawn, *((_known_masks,) if masks else ())):
        cache.cache_clear()
