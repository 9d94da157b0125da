# SPDX-License-Identifier: Apache-2.0
"""Recommend the sparsest rule that keeps a share of a head's attention mass, and say why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynaxx.lab.analyze.capture import LayerAttention
from dynaxx.lab.analyze.maps import SINK_TOKENS, MapStatistics
from dynaxx.lab.analyze.result import TARGET_RECALL, HeadAnalysis, Recommendation
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


LINES = 64  # number of heaviest columns, and of diagonals, that count as lines
LINES_MASS = 0.2  # share of mass, besides sink and local tokens, that lines must hold for the kind "lines"


def recommend(
    head: HeadAnalysis,
    attention: LayerAttention,
    statistics: MapStatistics,
    tried: Sequence[Candidate],
) -> Recommendation:
    """Return the sparsest rule (a window with sinks, or a selector) that reaches the target, or dense."""
    seqlen = len(statistics.by_distance)
    if attention.window is not None and attention.window < seqlen:
        reason = f"the layer already has a window of {attention.window} tokens; leave it"
        return Recommendation("windowed", "dense", reason, 1.0, 1.0)
    window = _smallest_window(statistics)
    selected = _cheapest_selector(head, tried)
    if window and (selected is None or window.density <= 1.1 * selected.density):
        return window
    if selected:
        return selected
    best = max(SELECTORS, key=lambda name: head.recall[name][-1])
    reason = (
        f"broad: {_hold(best, head.density[best][-1], head.recall[best][-1])}, "
        f"and the best choice {head.recall['oracle'][-1]:.0%}; keep it dense"
    )
    return Recommendation("broad", "dense", reason, 1.0, 1.0)


def _smallest_window(statistics: MapStatistics) -> Recommendation | None:
    """Return sinks and the smallest window (a power of two) that reach the target with at most half of the blocks."""
    rows, seqlen, sinks = statistics.rows, len(statistics.by_slash), SINK_TOKENS
    window = statistics.block_size
    while window < seqlen:
        recall = (statistics.sink_mass + float(statistics.by_slash[:window].sum())) / rows
        density = window_density(window, sinks, seqlen, statistics.block_size)
        if recall >= TARGET_RECALL and density <= BUDGETS[-1]:
            near = float(statistics.by_distance[:window].sum()) / rows
            place = f"{near:.0%} of the mass within {window:,} tokens"
            if recall - near > 0.02:
                place += f" and {recall - near:.0%} more on the first {sinks}"
            attention = f"Sink({sinks}) | SlidingWindow({window})"
            return Recommendation("local", attention, f"local: {place}", density, min(1.0, recall))
        window *= 2
    return None


def _cheapest_selector(head: HeadAnalysis, tried: Sequence[Candidate]) -> Recommendation | None:
    reaching = []
    for candidate in tried:
        if candidate.name in SELECTORS:
            at = BUDGETS.index(candidate.budget)
            recall, density = head.recall[candidate.name][at], head.density[candidate.name][at]
            if recall >= TARGET_RECALL:
                reaching.append((density, -recall, candidate))
    if not reaching:
        return None
    density, recall, candidate = min(reaching, key=lambda each: each[:2])
    finds = _hold(candidate.name, density, -recall)
    lines = {"vertical": head.vertical_mass, "slash": head.slash_mass}
    widest = max(lines, key=lambda name: lines[name])
    kind = "lines" if lines[widest] >= LINES_MASS else "selected"
    reason = f"{widest} lines: {LINES} of them hold {lines[widest]:.0%}; {finds}" if kind == "lines" else finds
    return Recommendation(kind, candidate.attention, reason, density, -recall)


def _hold(scorer: str, density: float, recall: float) -> str:
    return f"{density:.0%} of the blocks, chosen by {SCORER_WORDS[scorer]}, hold {recall:.0%} of the mass"
