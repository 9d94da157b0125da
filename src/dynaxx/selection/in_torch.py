# SPDX-License-Identifier: Apache-2.0
"""Choose blocks in torch, on any device: the definition that `device` and `in_core` equal."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid, BlockLayout
from dynaxx.layout.masks import EMPTY, FULL, ElementMasks, causal_mask_ids
from dynaxx.patterns import Pattern
from dynaxx.selection.choice import Choice, count_heads_per_choice, shared_ranks, shared_scores
from dynaxx.selection.scorers.base import pieces
from dynaxx.selection.static import static_part

BYTES_PER_SCORE = 64  # measured peak of scoring a block, ranking it and listing the chosen blocks


def select_in_torch(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | None,
    selector: Choice,
    grid: BlockGrid,
    scale: float,
    memory_budget: int,
) -> BlockLayout:
    """Return the layout of a selector, with the blocks of a pattern if there is one. A few rows of blocks at a time."""
    batch, _, heads, _ = q.shape
    forced = _Forced.of(pattern, grid, q.device)
    score_rows = selector.scorer.prepare(q, k, grid, scale, memory_budget=max(1, memory_budget // 2))
    heads_per_choice = count_heads_per_choice(selector, heads, k.shape[2])
    copies = heads_per_choice if isinstance(getattr(selector, selector.budget_field), tuple) else 1
    cols = torch.arange(grid.kv_blocks, device=q.device)
    flat_rows, columns, mask_ids = [cols[:0]], [cols[:0]], [cols[:0]]
    row_bytes = BYTES_PER_SCORE * batch * heads * grid.kv_blocks
    for start, stop in pieces(grid.q_blocks if grid.kv_blocks else 0, row_bytes, memory_budget // 2):
        rows = torch.arange(start, stop, device=q.device)
        causal_mask_id = causal_mask_ids(grid, rows[:, None], cols)
        own = forced.mask_ids(start, stop)
        covered = (own == FULL) | ((own >= 0) & (forced.same_as_causal[own.clamp(min=0)] == causal_mask_id))
        scores = score_rows(start, stop)
        _check(scores, (batch, heads, stop - start, grid.kv_blocks), "scores", selector.scorer)
        most = torch.finfo(scores.dtype).max  # NaN ranks first, so that it reaches the output of attention
        scores = scores.nan_to_num_(most, most, -torch.inf).masked_fill_(causal_mask_id == EMPTY, -torch.inf)
        optional = (causal_mask_id != EMPTY) & ~covered
        shared = (
            shared_ranks(scores, optional, heads_per_choice)
            if selector.only_ranks
            else shared_scores(scores, heads_per_choice)
        )
        scores = shared.repeat_interleave(copies, dim=1)
        del shared
        chosen = selector.choose(scores, optional, grid.causal_kv_blocks(rows))
        _check(chosen, tuple(scores.shape), "a choice", selector)
        chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
        del scores
        b, h, r, col = (chosen | (own != EMPTY)).nonzero(as_tuple=True)
        flat_rows.append((b * heads + h) * grid.q_blocks + r + start)
        columns.append(col)
        mask_ids.append(torch.where(chosen[b, h, r, col], causal_mask_id[r, col], own[r, col]))
    return BlockLayout.from_entries(
        grid,
        torch.cat(flat_rows),
        torch.cat(columns),
        torch.cat(mask_ids),
        forced.masks,
        layout_batch=batch,
        layout_heads=heads,
    )


def _check(found: object, shape: tuple[int, ...], what: str, rule: object) -> None:
    """Check what a scorer or a selector returned, which may be the user's own."""
    if not isinstance(found, Tensor):
        raise TypeError(f"{type(rule).__name__} must give {what} as a tensor, got {type(found).__name__}")
    fits = found.is_floating_point() if what == "scores" else found.dtype == torch.bool
    if tuple(found.shape) != shape or not fits:
        raise ValueError(
            f"{type(rule).__name__} must give {what} as {'floats' if what == 'scores' else 'bools'} of shape "
            f"(batch, heads, q blocks, kv blocks) = {shape}, got {found.dtype} {tuple(found.shape)}"
        )


class _Forced(NamedTuple):
    """The blocks that a hybrid's pattern always shows, and their masks."""

    grid: BlockGrid
    starts: list[int]  # (q_blocks + 1) offsets of each row's entries; empty without a pattern
    entries: tuple[Tensor, Tensor, Tensor]  # row, kv block, and mask id in `masks` of each block that the pattern shows
    same_as_causal: Tensor  # see `Static.same_as_causal`
    masks: ElementMasks  # the causal masks, then the pattern's

    @classmethod
    def of(cls, pattern: Pattern | None, grid: BlockGrid, device: torch.device) -> _Forced:
        part = static_part(pattern, grid)
        rows, cols = (part.mask_ids, part.mask_ids) if part.layout is None else part.layout.entries()[:2]
        starts = [] if part.layout is None else part.layout.kv_indptr[0, 0].tolist()
        entries = rows.to(device), cols.to(device), part.mask_ids.to(device)
        return cls(grid, starts, entries, part.same_as_causal.to(device), part.masks.to(device))

    def mask_ids(self, start: int, stop: int) -> Tensor:
        """Return (stop - start, kv_blocks) int64 mask ids of the blocks of some rows, EMPTY outside the pattern."""
        table = torch.full(
            (stop - start, self.grid.kv_blocks), EMPTY, device=self.same_as_causal.device, dtype=torch.int64
        )
        if self.starts:
            some = slice(self.starts[start], self.starts[stop])
            rows, cols, mask_ids = (each[some] for each in self.entries)
            table[rows - start, cols] = mask_ids
        return table
