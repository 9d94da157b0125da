# SPDX-License-Identifier: Apache-2.0
"""Budgets of heads for any density, and the loss that they are predicted to cost on each kind of text.

Budgets per head have the smallest loss on the mean of all kinds. More weight for the kind closest to the tolerance
makes its predicted loss smaller, but not its loss on other text. Tasks that must hold count beside the
texts: docs/decisions/tuning.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dynaxx.lab.texts import float64
from dynaxx.lab.tune.costs import SMALLEST_LOSS, Allocator, Budgets, Costs, interpolate
from dynaxx.selection import Scorer

TASK_WEIGHT = 0.3  # of the loss on tasks beside that on texts, both as shares of the loss at the smallest budget


class Candidate(NamedTuple):
    """Budgets to try."""

    aim: float  # mean density over heads that the texts for costs predict
    budgets: Budgets
    predicted: Mapping[str, float]  # loss in nats per token by kind of text, up to a factor


class Candidates(Protocol):
    """Budgets for any density."""

    least: float  # smallest possible density

    def at(self, density: float) -> Candidate:
        """Return the best budgets with at most this density."""

    def of(self, budgets: Budgets) -> Candidate:
        """Return the candidate with these budgets."""


class TunedCandidates:
    """Budgets per head with the smallest predicted loss, the mean over the kinds of text, and on tasks.

    Args:
        costs: costs of the heads on each kind of text.
        scorer: the scorer of blocks.
        of_tasks: costs of the heads on tasks, if any must hold.
    """

    def __init__(self, costs: Mapping[str, Costs], scorer: Scorer, of_tasks: Costs | None = None) -> None:
        self._losses = {kind: each.finer(scorer).loss[scorer] for kind, each in costs.items()}
        self._scorer, self.costs = scorer, Costs.mean(list(costs.values())).finer(scorer)
        loss = torch.stack(list(self._losses.values())).mean(0)
        if of_tasks is not None:
            added = of_tasks.finer(scorer).loss[scorer]
            loss = loss + added * (TASK_WEIGHT * loss[0].sum() / added[0].sum().clamp_min(SMALLEST_LOSS))
        self._allocator = Allocator(self.costs.density[scorer], loss)
        self.least = self._allocator.least_density

    def at(self, density: float) -> Candidate:
        """Return the best budgets with at most this density."""
        found = self._allocator.at(density)
        predicted = {kind: float(loss.gather(0, found.choice[None]).sum()) for kind, loss in self._losses.items()}
        return Candidate(found.density, self.costs.budgets(found.choice), predicted)

    def of(self, budgets: Budgets) -> Candidate:
        """Return the candidate with these budgets, each interpolated between those with known costs."""
        wanted = float64(budgets).flatten()
        values = float64(self.costs.values)
        upper = torch.searchsorted(values, wanted).clamp(1, len(values) - 1)
        share = ((wanted - values[upper - 1]) / (values[upper] - values[upper - 1])).clamp(0, 1)

        def at(costs: Tensor) -> Tensor:
            low, high = costs.gather(0, (upper - 1)[None])[0], costs.gather(0, upper[None])[0]
            return torch.lerp(low, high, share)

        aim = float(at(self.costs.density[self._scorer]).mean())
        return Candidate(aim, budgets, {kind: float(at(loss).sum()) for kind, loss in self._losses.items()})


class UniformCandidates:
    """One budget for all heads, with the costs of `tuned`."""

    def __init__(self, tuned: TunedCandidates) -> None:
        self.least, self.of, self._costs = tuned.least, tuned.of, tuned.costs

    def at(self, density: float) -> Candidate:
        """Return the budget with this density."""
        (densities,) = self._costs.density.values()
        budget = interpolate(density, densities.mean(1).tolist(), self._costs.values)
        return self.of([[budget] * self._costs.heads for _ in self._costs.layers])
