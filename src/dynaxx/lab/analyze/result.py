# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx analyze`: every head and the totals, as objects, plain data and text."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.analyze.maps import LOCAL_TOKENS, SINK_TOKENS
from dynaxx.lab.results import plain

TARGET_RECALL = 0.95
HEAT_LOW = 1e-5  # share at a heat map's smallest value


@dataclass(frozen=True)
class MassByDistance:
    """Attention mass by query-to-key distance in tokens, in bins that double."""

    edges: tuple[int, ...]  # bin i holds edges[i] <= distance < edges[i + 1]
    mass: tuple[float, ...]  # share of all attention, sums to 1


@dataclass(frozen=True)
class Recommendation:
    """The sparsest rule tried that keeps the target share of a head's attention mass."""

    kind: str  # "local", "lines", "selected", "broad", or "windowed" (the layer has a window)
    attention: str  # as Python: "Sink(4) | SlidingWindow(256)", "Sink(64) | ... | TopK(0.1, MeanPool())", or "dense"
    reason: str
    density: float
    recall: float


@dataclass(frozen=True)
class HeadAnalysis:
    """One head. Masses are shares of its attention, averaged over queries. The four kinds of places may overlap."""

    layer: int
    head: int
    mass_by_distance: MassByDistance
    median_distance: int  # half of the mass is at most this many tokens back
    sink_mass: float  # mass on the first SINK_TOKENS tokens
    local_mass: float  # mass within LOCAL_TOKENS tokens, without the sink
    vertical_mass: float  # mass on the LINES heaviest keys, without sink and local tokens
    slash_mass: float  # mass on the LINES heaviest diagonals, without sink and local tokens
    entropy: float  # nats, mean over queries; exp(entropy) is an effective number of keys
    recall: dict[str, tuple[float, ...]]  # rule -> share of the mass on its visible pairs, one per budget
    density: dict[str, tuple[float, ...]]  # rule -> density at each budget
    recommended: Recommendation
    heatmap: Tensor = field(repr=False, compare=False)  # (cells, cells) mean share of a row's attention in a cell

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return _rounded({**plain(self), "heatmap": encode_heatmap(self.heatmap)})


@dataclass(frozen=True)
class RuleAtBudgets:
    """A rule at each of its budgets."""

    attention: tuple[str, ...]
    density: tuple[float, ...]  # mean over the heads, one per budget
    recall: tuple[float, ...]  # mean over the heads, one per budget


@dataclass(frozen=True)
class AnalysisResult:
    """Every analyzed head, and the totals."""

    model: str
    tokens: int
    rows: int  # sampled queries per head; all queries up to MAX_ROWS tokens
    block_size: int
    seed: int
    start: int  # token of the text at which the sample begins
    budgets: tuple[float, ...]
    rules: dict[str, RuleAtBudgets]
    heads: tuple[HeadAnalysis, ...]
    seconds: float

    @property
    def totals(self) -> dict[str, Any]:
        """Return the totals over all analyzed heads."""
        count = max(1, len(self.heads))
        return {
            "heads": len(self.heads),
            "kinds": dict(Counter(head.recommended.kind for head in self.heads).most_common()),
            "mean_recommended_density": sum(head.recommended.density for head in self.heads) / count,
            "target_recall": TARGET_RECALL,
            "mean_sink_mass": sum(head.sink_mass for head in self.heads) / count,
            "mean_local_mass": sum(head.local_mass for head in self.heads) / count,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        listed = {**plain(replace(self, heads=())), "summary": self.totals}
        return {**_rounded(listed), "heads": [head.to_dict() for head in self.heads]}

    def summary(self) -> str:
        """Return the text that the command prints."""
        totals = self.totals
        kinds = ", ".join(f"{count} {kind}" for kind, count in totals["kinds"].items())
        lines = [
            f"{len(self.heads)} heads, {self.tokens:,} tokens, {self.rows:,} queries each, {self.seconds:.0f} s",
            f"attention on the first {SINK_TOKENS} tokens {totals['mean_sink_mass']:.0%}, "
            f"within {LOCAL_TOKENS} tokens {totals['mean_local_mass']:.0%}",
            "",
            f"{'mean recall at a density of about':36}" + "".join(f"{budget:8.0%}" for budget in self.budgets),
        ]
        lines += [f"  {name:34}" + "".join(f"{x:8.1%}" for x in rule.recall) for name, rule in self.rules.items()]
        lines += [
            "",
            f"heads by the kind of rule that keeps {TARGET_RECALL:.0%} of their attention: {kinds}",
            f"mean density of these rules: {totals['mean_recommended_density']:.0%}",
        ]
        return "\n".join(lines)


def encode_heatmap(heatmap: Tensor) -> dict[str, Any]:
    """Encode a heat map as bytes on a log scale: 0 is zero, 1 is `low` or less, 255 is all of a row's attention."""
    decades = -torch.tensor(HEAT_LOW, dtype=torch.float32, device="cpu").log10()
    level = 1 + 254 * (1 + heatmap.clamp(min=HEAT_LOW, max=1.0).log10() / decades)
    codes = torch.where(heatmap > 0, level, 0.0).round().to(torch.uint8)
    data = base64.b64encode(bytes(codes.flatten().tolist())).decode()
    return {"size": heatmap.shape[0], "low": HEAT_LOW, "scale": "log10", "data": data}


def _rounded(value: Any) -> Any:
    """Round floats to five digits, to keep the file small and readable."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
