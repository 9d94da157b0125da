# SPDX-License-Identifier: Apache-2.0
"""The candidates of `dynaxx tune`, and the cost of each for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.tune.sensitivity import HeadCosts
from dynaxx.patterns import LastQueries, LocalBlocks, Sink
from dynaxx.selection import Hybrid, MeanQuery, MinMax, Scorer, TopK

BUDGETS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # budgets that heads choose from

Budgets = list[list[float]]  # per layer and q head


@dataclass(frozen=True)
class Way:
    """A way to choose blocks, up to the budgets of the heads.

    Attributes:
        scorer: the scorer of blocks.
        local: tokens up to a q block's end that are always visible, in whole blocks.
    """

    scorer: Scorer
    local: int = 128

    def rule(self, budget: float | tuple[float, ...], block_size: int, last_queries: int, floor: int) -> Hybrid:
        """Return the rule with one budget for all heads, or one per head.

        Args:
            budget: share of a row's blocks.
            block_size: tokens per block.
            last_queries: last queries that see everything.
            floor: `TopK.floor`.
        """
        local = LocalBlocks(max(1, self.local // block_size))
        pattern = Sink(block_size) | local | LastQueries(last_queries)
        return Hybrid(pattern, TopK(budget, self.scorer, floor, per="head"))

    def __str__(self) -> str:
        return f"{self.scorer!r}, {self.local} local tokens"


WAYS = (Way(MeanQuery()), Way(MinMax(bound=0.5)))


class Costs(NamedTuple):
    """The cost of every candidate for every head, by way to choose. Each tensor is (budgets, layers * heads)."""

    layers: tuple[int, ...]
    density: dict[Way, Tensor]
    loss: dict[Way, Tensor]

    @property
    def heads(self) -> int:
        return next(iter(self.density.values())).shape[1] // len(self.layers)

    def budgets(self, choice: Tensor) -> Budgets:
        """Return the budgets of each layer's heads in an allocation."""
        return torch.tensor(BUDGETS, dtype=torch.float64)[choice].view(len(self.layers), self.heads).tolist()

    def uniform(self, way: Way, density: float) -> tuple[float, float]:
        """Return the density (at least the smallest possible one), and the uniform budget that gives it."""
        densities = self.density[way].mean(1).tolist()
        return max(density, densities[0]), _interpolate(density, densities, BUDGETS)

    def uniform_loss(self, way: Way, density: float) -> float:
        """Return the predicted loss of one budget for all heads at a density."""
        densities, losses = self.density[way].mean(1).tolist(), self.loss[way].sum(1).tolist()
        return _interpolate(density, densities, losses)

    @staticmethod
    def mean(costs: Sequence[Costs]) -> Costs:
        """Return the mean cost and the mean density over several texts."""
        mean = lambda tensors: torch.stack(tensors).mean(0)
        return Costs(
            costs[0].layers,
            {way: mean([each.density[way] for each in costs]) for way in costs[0].density},
            {way: mean([each.loss[way] for each in costs]) for way in costs[0].loss},
        )

    @staticmethod
    def plain(costs: Sequence[HeadCosts]) -> dict[str, Any]:
        """Return the costs of all layers as JSON data."""
        if not costs:
            return {"layers": [], "density": [], "loss": []}
        return {
            "layers": [each.layer for each in costs],
            "density": torch.cat([each.density for each in costs], dim=1).tolist(),
            "loss": torch.cat([each.loss for each in costs], dim=1).tolist(),
        }

    @classmethod
    def of(cls, found: dict[str, Any]) -> Costs:
        """Read the costs of each way that `plain` wrote."""
        density, loss = (torch.tensor(found[name]).chunk(len(WAYS)) for name in ("density", "loss"))
        by_way = lambda parts: dict(zip(WAYS, parts, strict=True))
        return cls(tuple(found["layers"]), by_way(density), by_way(loss))


def _interpolate(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate y linearly at x, clamped, for ascending xs."""
    if at <= xs[0]:
        return ys[0]
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / max(x1 - x0, 1e-12)
    return ys[-1]
