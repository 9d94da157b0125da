# SPDX-License-Identifier: Apache-2.0
"""Recommend the sparsest rule that keeps a share of a head's attention mass, and say why."""

from __future__ import annotations

from collections.abc import Sequence

from dynaxx.lab.analyze.capture import LayerAttention
from dynaxx.lab.analyze.maps import SINK_TOKENS, MapStatistics
from dynaxx.lab.analyze.result import TARGET_RECALL, HeadAnalysis, Recommendation
from dynaxx.lab.analyze.rules import BUDGETS, SCORER_WORDS, SELECTORS, Candidate, window_density

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
