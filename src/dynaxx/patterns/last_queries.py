# SPDX-License-Identifier: Apache-2.0
"""The pattern in which the last queries of a prompt see every key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, distinct
from dynaxx.patterns.program import FAR, Op, positions
from dynaxx.patterns.runs import Runs, Visited
from dynaxx.settings import Count


@dataclass(frozen=True)
class LastQueries(Pattern, kind="last_queries"):
    """Every key, for the last `queries` queries: the question at the end of a prompt.

    The answer may be anywhere in the prompt. The pattern visits a share of about 2 * queries / seqlen of a causal
    layout's blocks.
    """

    queries: Count

    def _since(self, grid: BlockGrid) -> int:
        """Return the position of the first of these queries, which are at most all queries of the grid."""
        return grid.seqlen_k - min(self.queries, grid.seqlen_q)

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos >= self._since(grid)) & torch.ones_like(k_pos, dtype=torch.bool)

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        if not self.queries:
            return Visited(Runs.none(), Runs.none())
        first, _ = grid.spans()
        since = self._since(grid)
        whole = lambda some: Runs.one(np.zeros_like(first), some * grid.kv_blocks)
        return Visited(whole(first + grid.block_size[0] > since), whole(first >= since))

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        q_block = blocks.grid.block_size[0]
        hidden = self._since(blocks.grid) - (blocks.rows * q_block + blocks.grid.offset)
        found, kind = distinct(np.minimum(np.maximum(hidden, 0), q_block), q_block + 1)
        return Kinds(kind, -(np.arange(q_block) >= found[:, None]).astype(np.int32)[:, :, None])

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return positions(Op.QUERIES, [(self._since(grid), FAR)] if self.queries else [])
