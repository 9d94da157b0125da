"""Which compressed tokens a query may see: the staircase of Native Sparse Attention's first branch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import BlockStates, Pattern, Visited
from dynaxx.patterns.runs import Runs


@dataclass(frozen=True)
class Compressed(Pattern):
    """Keys that stand for `block` tokens each, `stride` apart; a query sees those that end at or before it.

    Make its layouts with `causal=False`: the rule is causal in tokens, and its keys are not tokens.

    Args:
        block: tokens that one key stands for (arXiv 2502.11089, eq. 7).
        stride: tokens between the starts of neighbouring keys.
        first: token that query 0 stands at; tokens - seqlen_q where queries are the last ones.
    """

    block: int
    stride: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.block < 1 or self.stride < 1:
            raise ValueError(f"`block` and `stride` must be >= 1, got {self.block} and {self.stride}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos * self.stride + self.block - 1 <= q_pos - grid.offset + self.first

    def visited(self, grid: BlockGrid) -> Visited:
        first, last = self._tokens(grid, grid.rows())
        keys = lambda token: torch.div(token + 1 - self.block, self.stride, rounding_mode="floor") + 1  # ended by then
        end = lambda count: count.clamp(0, grid.seqlen_k)
        zero = torch.zeros_like(first)
        touched = Runs.one(zero, -(-end(keys(last)) // grid.block_size[1]))
        return Visited(touched, Runs.one(zero, end(keys(first)) // grid.block_size[1]).within(touched))

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        first, last = self._tokens(grid, rows)
        begin = cols * grid.block_size[1] * self.stride + self.block - 1  # the last token of the block's first key
        end = begin + (grid.block_size[1] - 1) * self.stride
        full, touched = end <= first, begin <= last
        return BlockStates(full, touched & ~full, first - begin)

    def _tokens(self, grid: BlockGrid, rows: Tensor) -> tuple[Tensor, Tensor]:
        """First and last token that the queries of each row stand at, the last row whole."""
        first = rows * grid.block_size[0] + self.first
        return first, first + grid.block_size[0] - 1
