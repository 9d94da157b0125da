# SPDX-License-Identifier: Apache-2.0
"""The rules that `analyze` tries on every head, at budgets that give them about the same densities."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from dynaxx.layout import BlockGrid, as_block_size
from dynaxx.patterns import LocalBlocks, Pattern, Sink, SlidingWindow
from dynaxx.selection import Hybrid, MeanPool, MeanQuery, MinMax, Scorer, TopK

BUDGETS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # shares of the causally visible blocks
SELECTORS: dict[str, Scorer] = {"mean_pool": MeanPool(), "min_max": MinMax(), "mean_query": MeanQuery()}
SCORER_WORDS = {
    "mean_pool": "mean-pooled keys",
    "min_max": "the min/max bound of the keys",
    "mean_query": "the mean query",
}

LOCAL_BLOCKS = 2  # local blocks of every hybrid, besides a block of sinks


@dataclass(frozen=True)
class Candidate:
    """A rule at one budget. `rule` is None for the oracle, which chooses the blocks with most true mass."""

    name: str
    budget: float
    rule: Pattern | Hybrid | None

    @property
    def attention(self) -> str:
        """The rule as Python code."""
        if self.rule is None:
            return f"the {self.budget:.0%} of blocks with most attention"
        if isinstance(self.rule, Hybrid):
            selector = self.rule.selector
            assert isinstance(selector, TopK), "all hybrids here select with TopK"
            return f"{_plain(self.rule.pattern)} | TopK({selector.budget}, {type(selector.scorer).__name__}())"
        return _plain(self.rule)


def candidates(seqlen: int, block_size: int) -> tuple[Candidate, ...]:
    """Build every rule at every budget.

    The rules are sinks with a window ("streaming"), sinks and local blocks with top-k by each scorer, and the oracle.
    Windows and shares are chosen so that the density is closest to the budget.
    """
    grid = BlockGrid(seqlen, seqlen, as_block_size(block_size))
    forced = Sink(block_size) | LocalBlocks(LOCAL_BLOCKS)
    listed = [Candidate("streaming", budget, _streaming(grid, budget)) for budget in BUDGETS]
    for name, scorer in SELECTORS.items():
        for budget in BUDGETS:
            listed.append(Candidate(name, budget, forced | TopK(_share(forced, grid, budget), scorer, per="head")))
    return (*listed, *(Candidate("oracle", budget, None) for budget in BUDGETS))


def window_density(window: int, sinks: int, seqlen: int, block_size: int) -> float:
    """Return the density of sinks and a window."""
    return (Sink(sinks) | SlidingWindow(window)).layout(seqlen, block_size=block_size).density()


def _streaming(grid: BlockGrid, density: float) -> Pattern:
    """Return a block of sinks and the window of whole blocks that is closest to a density."""
    size = grid.block_size[1]
    windows = [blocks * size for blocks in range(1, grid.kv_blocks + 1)]
    best = min(windows, key=lambda window: abs(window_density(window, size, grid.seqlen_q, size) - density))
    return Sink(size) | SlidingWindow(best)


def _share(forced: Pattern, grid: BlockGrid, density: float) -> float:
    """Return the share (to three digits) with which `TopK`, added to `forced`, is closest to a density."""
    visible = grid.causal_kv_blocks(grid.rows())
    forced_blocks = forced.layout(grid.seqlen_q, block_size=grid.block_size).kv_num_blocks[0, 0]
    shares = torch.arange(0, 1001, device="cpu")[:, None] / 1000
    counts = torch.minimum(forced_blocks + (visible * shares).ceil(), visible)
    densities = counts.sum(1) / visible.sum()
    return int((densities - density).abs().argmin()) / 1000


def _plain(pattern: Pattern) -> str:
    return re.sub(r"\b(window|blocks)=", "", repr(pattern))
