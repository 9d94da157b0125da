# SPDX-License-Identifier: Apache-2.0
"""Score blocks by the vertical and slash lines in the attention of the last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import (
    MEMORY_BUDGET,
    Scorer,
    ScoreRows,
    per_kv_head,
    pieces,
    sum_groups,
)
from dynaxx.settings import Range


@dataclass(frozen=True)
class LastQueryProbe(Scorer, kind="lines_of_last_queries"):
    """Vertical and slash lines in the attention of the last queries (MInference).

    The attention of the last `queries` queries over all keys is summed by key (vertical lines) and by distance (slash
    lines). A block's score is the mass of the lines that cross it.
    """

    queries: Annotated[int, Range(1, tries=(1, 64, 1000))] = 64

    @override
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        queries = min(self.queries, grid.seqlen_q)
        (q_block, kv_block), (batch, seqlen_k, _, dim) = grid.block_size, k.shape
        probes = q[:, grid.seqlen_q - queries :].float().transpose(1, 2) * scale  # (B, Hq, P, D)
        reach = max(grid.seqlen_q, seqlen_k) + q_block + kv_block  # distances -reach .. reach, for cumulative sums
        by_key = probes.new_zeros(*probes.shape[:2], seqlen_k)
        by_distance = probes.new_zeros(*probes.shape[:2], 2 * reach + 1)
        position = torch.arange(seqlen_k, device=q.device)
        for first, last in pieces(probes.shape[2], 12 * batch * q.shape[2] * (seqlen_k + 64), memory_budget // 2):
            count = last - first
            logits = probes.new_empty(*probes.shape[:2], count, seqlen_k)
            for a, b in pieces(seqlen_k, 4 * batch * (k.shape[2] * dim + q.shape[2] * count), memory_budget // 4):
                logits[..., a:b] = per_kv_head(probes[:, :, first:last], k[:, a:b].float().permute(0, 2, 3, 1))
            stands = seqlen_k - probes.shape[2] + torch.arange(first, last, device=q.device)
            if grid.causal:
                logits.masked_fill_(position > stands[:, None], -torch.inf)
            sees_none = (stands < 0)[:, None] & grid.causal
            logits = logits.softmax(-1).masked_fill_(sees_none, 0.0).div_(probes.shape[2])
            by_key += logits.sum(2)
            # Sum by distance. Each probe is one key further than the one before. Reading rows padded with zeros as
            # rows that are one element shorter shifts each row by one against the next.
            padded = logits.new_zeros(*logits.shape[:3], seqlen_k + count)
            padded[..., :seqlen_k] = logits.flip(-1)
            lines = seqlen_k + count - 1
            shifted = padded.flatten(2)[..., : count * lines].unflatten(-1, (count, lines))
            near = reach - probes.shape[2] + first + 1
            by_distance[..., near : near + lines] += shifted.sum(2)
        by_block = sum_groups(by_key, kv_block, -1)  # (B, Hq, C)
        cumulative = torch.nn.functional.pad(by_distance, (1, 0)).cumsum_(-1)
        cols = torch.arange(grid.kv_blocks, device=q.device)

        def rows(start: int, stop: int) -> Tensor:
            row = torch.arange(start, stop, device=q.device)[:, None]
            first = row * q_block + grid.offset - cols * kv_block + reach  # distance of the block's first pair
            lo, hi = (first - kv_block + 1).clamp(min=0), (first + q_block).clamp(max=2 * reach + 1)
            slash = cumulative[..., hi.flatten()].sub_(cumulative[..., lo.flatten()]).unflatten(-1, first.shape)
            return slash.clamp_(min=0).add_(by_block[:, :, None]).log_()

        return rows
