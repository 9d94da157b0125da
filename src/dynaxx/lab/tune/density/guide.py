# SPDX-License-Identifier: Apache-2.0
"""Try densities until the sparsest one that passes is known closely enough.

The next density is the one at which the predicted rise of the worst kind of text, with its errors, reaches the
tolerance. After each trial the prediction is updated. While all trials fail, steps grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dynaxx.lab.tune.density.candidates import Candidate, Candidates
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.result import Trial

GUESSES = 4  # after so many guesses, the prediction is inaccurate and bisection is faster
STEPS = 40  # bisection steps that solve for a density
CLOSER = 0.99  # relative distance of a guess from the end of an interval that ends the search


class Tried(NamedTuple):
    """One trial and its candidate."""

    candidate: Candidate
    trial: Trial


class Guide:
    """Search for the sparsest candidate that passes.

    Args:
        candidates: budgets for any density.
        rises: predictions, updated with each trial.
        fine: ratio of the passing to the failing density at which the search ends.
        least: the lowest density of interest; the default is the lowest possible one.
    """

    def __init__(self, candidates: Candidates, rises: Rises, fine: float, least: float = 0.0) -> None:
        self.candidates, self.rises, self.fine = candidates, rises, fine
        self.least = max(candidates.least, least)
        self.tried: list[Tried] = []
        self._guesses = 0

    @property
    def best(self) -> Tried | None:
        """Return the sparsest trial that passed."""
        passed = [each for each in self.tried if each.trial.passed]
        return min(passed, key=lambda each: each.candidate.aim, default=None)

    @property
    def trials(self) -> list[Trial]:
        """Return the trials from dense to sparse."""
        return [each.trial for each in sorted(self.tried, key=lambda each: -each.candidate.aim)]

    def bounds(self) -> tuple[float | None, float]:
        """Return the highest density that failed below the lowest one that passed, or None, and the latter, or 1."""
        passed = 1.0 if self.best is None else self.best.candidate.aim
        below = [each.candidate.aim for each in self.tried if not each.trial.passed and each.candidate.aim < passed]
        return max(below, default=None), passed

    @property
    def done(self) -> bool:
        """Return whether the interval is small enough."""
        failed, passed = self.bounds()
        return bool(self.tried) and passed / max(failed or 0.0, self.least, 1e-6) < self.fine

    def learn(self, candidate: Candidate, trial: Trial) -> None:
        """Add a trial."""
        self.tried.append(Tried(candidate, trial))
        self.rises.learn(candidate.predicted, trial.rows)

    def run(
        self,
        evaluate: Callable[[Candidate], Trial],
        steps: int,
        may_go_on: Callable[[Guide], bool] = lambda guide: True,
        start: float | None = None,
    ) -> None:
        """Evaluate at most so many candidates, the first at density `start` if one is given."""
        for _ in range(steps):
            if self.done or not may_go_on(self):
                break
            aim = self.next() if start is None or self.tried else max(self.least, start)
            candidate = self.candidates.at(aim)
            self.learn(candidate, evaluate(candidate))

    def next(self) -> float:
        """Return a density between the highest that failed and the lowest that passed."""
        failed, passed = self.bounds()
        lowest = self.least if failed is None else failed
        expected = self._expected(lowest, passed)
        # The ends of the interval are already known. A trial close to one ends the search with either result.
        step = 1 + CLOSER * (self.fine - 1)
        if self.best is None:  # further up after each failure
            return min(max(expected, lowest * step ** (2 ** len(self.tried) - 1)), math.sqrt(lowest))
        if failed is None:
            return max(self.least, min(expected, passed / step))
        self._guesses += 1
        nearest, farthest = lowest * step, passed / step
        if self._guesses > GUESSES or nearest >= farthest:
            return math.sqrt(lowest * passed)
        return min(max(expected, nearest), farthest)

    def _expected(self, low: float, high: float) -> float:
        """Return the lowest density that is expected to pass."""
        passes = lambda density: self.rises.passes(self.candidates.at(density).predicted)
        low = max(low, self.least)
        if passes(low):
            return low
        for _ in range(STEPS):
            tried = (low + high) / 2
            low, high = (low, tried) if passes(tried) else (tried, high)
        return high
