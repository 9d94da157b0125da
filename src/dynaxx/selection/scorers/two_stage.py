# SPDX-License-Identifier: Apache-2.0
"""Score blocks in two stages: bounds of whole blocks choose candidates, which are then scored key by key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.kernels.selection.contract import Candidates
from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import MEMORY_BUDGET, Scorer, ScoreRows, pieces
from dynaxx.selection.scorers.pooling import MinMax
from dynaxx.selection.scorers.query import MeanQuery
from dynaxx.selection.scorers.tiles import tile_scores
from dynaxx.settings import Count, Range, Share


@dataclass(frozen=True)
class TwoStage(Scorer, kind="two_stage"):
    """Quest's bound of whole blocks, then `fine` for the best `keep` of them, a number or a share of the visible ones.

    For very long inputs, most blocks are ruled out before their keys are read. The first stage estimates the attention
    of mean queries to a block with Quest's bound, from the minima and maxima of the block's keys. `panel` neighbouring
    q blocks and all q heads of a kv head choose `keep` candidates together, by the sum of their estimates; the blocks
    that the panel itself covers are candidates as well. The second stage scores the candidates with `fine`. All other
    blocks get -inf, so that a budget takes them only if it takes every block. Set `keep` to about four times the
    budget, which loses almost no recall.

    Args:
        keep: an int is a number of candidates, a float a share of the visible blocks (rounded up).
        fine: the scorer that ranks the candidates.
        panel: number of q blocks that share candidates. Matrix units need many queries per key that is read.
    """

    keep: Count | Share = 0.25
    fine: MeanQuery = field(default_factory=MeanQuery)
    panel: Annotated[int, Range(1, tries=(1, 4, 32))] = 32

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.panel & (self.panel - 1):
            raise ValueError(f"`panel` must be a power of two of q blocks, got {self.panel}")

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        candidates = self.candidates(q, k, grid, scale, memory_budget) if grid.kv_blocks else None
        return self.fine.among(candidates, q, k, grid, scale, memory_budget=memory_budget)

    def candidates(self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, memory_budget: int) -> Candidates:
        """Return the candidates of the first stage."""
        (batch, _, q_heads, _), kv_heads, kv_block = q.shape, k.shape[2], grid.block_size[1]
        panel = min(self.panel, 1 << max(0, grid.q_blocks - 1).bit_length())  # at most one panel for all rows
        panels, tokens = -(-grid.q_blocks // panel), panel * grid.block_size[0]
        keep = min(self.keep, grid.kv_blocks) if isinstance(self.keep, int) else self.keep
        queries, keys = MinMax().tiles(q, k, kv_block, grid, scale, memory_budget // 2)
        mass_of = tile_scores(queries, keys, grid, (batch, q_heads), memory_budget // 2, panel)
        last_row = (torch.arange(1, panels + 1, device=k.device) * panel - 1).clamp(max=grid.q_blocks - 1)
        seen = grid.causal_kv_blocks(last_row)[:, None]  # (panels, 1) number of blocks that a panel sees
        own = seen  # the first block that the panel itself covers
        if grid.causal:
            stands = torch.arange(panels, device=k.device)[:, None] * tokens + grid.offset
            own = torch.minimum(stands.div(kv_block, rounding_mode="floor").clamp(min=0), seen)
        kept = torch.full_like(seen, keep) if isinstance(keep, int) else (seen.float() * keep).ceil().long()
        slots = keep if isinstance(keep, int) else math.ceil(keep * grid.kv_blocks)
        slots = min(grid.kv_blocks, slots + (tokens // kv_block + 2 if grid.causal else 0))
        column, slot = (torch.arange(n, device=k.device) for n in (grid.kv_blocks, slots))
        blocks = torch.empty(batch, kv_heads, panels, slots, dtype=torch.int32, device=k.device)
        for a, b in pieces(panels, 16 * batch * q_heads * grid.kv_blocks, memory_budget // 2):
            mass = mass_of(a, b).exp_().unflatten(1, (kv_heads, -1)).sum(2)
            mass.masked_fill_(column >= own[a:b], torch.inf).masked_fill_(column >= seen[a:b], -1.0)
            found = mass.topk(slots, dim=-1).indices.int()
            blocks[:, :, a:b] = found.masked_fill_(slot >= (kept + seen - own).minimum(seen)[a:b], -1)
        return Candidates(blocks, panel)
