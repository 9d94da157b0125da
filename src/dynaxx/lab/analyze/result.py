# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx analyze`: every head and the sums, as objects, as plain data and in words."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.analyze.maps import LOCAL_TOKENS, SINK_TOKENS
from dynaxx.lab.analyze.recommendation import TARGET_RECALL, Recommendation

HEAT_LOW = 1e-5  # share that a heat map's smallest value stands for


@dataclass(frozen=True)
class MassByDistance:
    """Attention mass by query-to-key distance in tokens, in bins that double."""

    edges: tuple[int, ...]  # bin i holds edges[i] <= distance < edges[i + 1]
    mass: tuple[float, ...]  # share of all attention, sums to 1


@dataclass(frozen=True)
class HeadAnalysis:
    """One head. Masses are shares of its attention, averaged over queries; the four kinds of place may overlap."""

    layer: int
    head: int
    mass_by_distance: MassByDistance
    median_distance: int  # half of the mass lies at most so many tokens back
    sink_mass: float  # mass on the first SINK_TOKENS tokens
    local_mass: float  # mass within LOCAL_TOKENS tokens, without the sink
    vertical_mass: float  # mass on the LINES heaviest keys, without sink and local tokens
    slash_mass: float  # mass on the LINES heaviest diagonals, without sink and local tokens
    entropy: float  # nats, mean over queries; exp(entropy) is an effective number of keys
    recall: dict[str, tuple[float, ...]]  # rule -> share of the mass on the pairs it shows, one per budget
    density: dict[str, tuple[float, ...]]  # rule -> density that each budget gave
    recommended: Recommendation
    heatmap: Tensor = field(repr=False, compare=False)  # (cells, cells) mean share of a row's attention in a cell

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "heatmap"}
        plain["mass_by_distance"] = asdict(self.mass_by_distance)
        plain["recommended"] = asdict(self.recommended)
        return _rounded(plain) | {"heatmap": encode_heatmap(self.heatmap)}


@dataclass(frozen=True)
class RuleAtBudgets:
    """A rule as it was tried, once per budget."""

    attention: tuple[str, ...]
    density: tuple[float, ...]  # densities of the budgets, mean over the heads
    recall: tuple[float, ...]  # mean over the heads


@dataclass(frozen=True)
class AnalysisResult:
    """Every head of the layers looked at, and the sums."""

    model: str
    tokens: int
    rows: int  # queries per head that were sampled; all of them up to MAX_ROWS tokens
    block_size: int
    seed: int
    start: int  # token of the text at which the sample begins
    budgets: tuple[float, ...]
    rules: dict[str, RuleAtBudgets]
    heads: tuple[HeadAnalysis, ...]
    seconds: float

    @property
    def totals(self) -> dict[str, Any]:
        """Over all heads looked at."""
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
        plain = {name: value for name, value in vars(self).items() if name not in ("heads", "rules")}
        rules = {name: asdict(rule) for name, rule in self.rules.items()}
        listed = _rounded(plain | {"rules": rules, "summary": self.totals})
        return listed | {"heads": [head.to_dict() for head in self.heads]}

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
            f"heads by what keeps {TARGET_RECALL:.0%} of their attention: {kinds}",
            f"mean density of that: {totals['mean_recommended_density']:.0%}",
        ]
        return "\n".join(lines)


def encode_heatmap(heatmap: Tensor) -> dict[str, Any]:
    """Encode a heat map as bytes on a log scale: 0 is nothing, 1 is `low` or less, 255 is all of a row's attention."""
    decades = -torch.tensor(HEAT_LOW).log10()
    level = 1 + 254 * (1 + heatmap.clamp(min=HEAT_LOW, max=1.0).log10() / decades)
    codes = torch.where(heatmap > 0, level, 0.0).round().to(torch.uint8)
    data = base64.b64encode(bytes(codes.flatten().tolist())).decode()
    return {"size": heatmap.shape[0], "low": HEAT_LOW, "scale": "log10", "data": data}


def _rounded(value: Any) -> Any:
    """Round floats to five digits, so that a file stays small and reads well."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
