# SPDX-License-Identifier: Apache-2.0
"""Try densities until the sparsest one that passes is known closely enough.

The first density is one that nearly always passes, so that there is a policy early. The next one is where the
predicted rise of the worst kind of text, with its errors, reaches the tolerance. After each trial the prediction is
updated. While all trials fail, densities grow up to `MOST`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dynaxx.lab.tune.costs import Budgets
from dynaxx.lab.tune.density.candidates import Candidate, Candidates
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.result import Trial

GUESSES = 4  # after so many guesses, the prediction is inaccurate and bisection is faster
STEPS = 40  # bisection steps that solve for a density
FIRST = 0.55  # density of the first trial, unless a denser one is expected to be needed
MOST = 0.9  # highest density that is tried; a policy that needs more is not worth it
INSIDE = 0.25  # least distance of a guess from the failing density, as a share of the interval of logarithms
BOLD = 1.25  # ratio of the passing density to the next one while none has failed, at least
CLOSER = 0.99  # relative distance of a guess from the end of an interval that ends the search


class Tried(NamedTuple):
    """One trial and its candidate."""

    candidate: Candidate
    trial: Trial
    bounds: bool = True  # whether a failure excludes sparser candidates, which have the same costs


class Guide:
    """Search for the sparsest candidate that passes.

    Args:
        candidates: budgets for any density.
        rises: predictions, updated with each trial.
        fine: ratio of the passing to the failing density at which the search ends.
        least: the lowest density of interest; the default is the lowest possible one.
        first: the lowest density of the first trial.
    """

    def __init__(
        self, candidates: Candidates, rises: Rises, fine: float, least: float = 0.0, first: float = 0.0
    ) -> None:
        self.candidates, self.rises, self.fine, self.first = candidates, rises, fine, first
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

    def bounds(self, decided: bool = True) -> tuple[float | None, float]:
        """Return the highest density that failed below the lowest one that passed, or None, and the latter, or 1.

        Without `decided`, undecided trials count as failed.
        """
        passed = 1.0 if self.best is None else self.best.candidate.aim
        failed = [each for each in self.tried if each.bounds and not each.trial.passed]
        failed = [each for each in failed if each.candidate.aim < passed and (each.trial.decided or not decided)]
        return max((each.candidate.aim for each in failed), default=None), passed

    def is_done(self, decided: bool = True) -> bool:
        """Return whether the interval of `bounds` is small enough."""
        failed, passed = self.bounds(decided)
        return self.hopeless if self.best is None else passed / max(failed or 0.0, self.least, 1e-6) < self.fine

    @property
    def unsettled(self) -> list[Tried]:
        """Return the trials that more text may decide otherwise: undecided ones, or the best if it is not clear.

        Undecided trials beyond the bounds, as those of another tolerance may be, need no decision.
        """
        failed, passed = self.bounds()
        tried = [each for each in self.tried if each.bounds and not each.trial.decided]
        tried = [each for each in tried if (failed or 0.0) < each.candidate.aim < passed]
        if not tried and self.best is not None and not all(row.decided for row in self.best.trial.rows):
            tried = [self.best]
        return tried

    @property
    def hopeless(self) -> bool:
        """Return whether the densest candidate failed."""
        failed, _ = self.bounds()
        return self.best is None and failed is not None and self.is_densest(failed)

    def is_densest(self, density: float) -> bool:
        """Return whether no denser candidate is tried."""
        return density >= CLOSER * max(MOST, self.least)

    def learn(self, candidate: Candidate, trial: Trial, bounds: bool = True) -> None:
        """Add a trial, in place of an earlier one of the same budgets."""
        self.tried = [each for each in self.tried if each.candidate.budgets != candidate.budgets]
        self.tried.append(Tried(candidate, trial, bounds))
        self.rises.learn(candidate.predicted, trial.rows)

    def run(
        self,
        evaluate: Callable[[Candidate], Trial | None],
        steps: int,
        start: float | None = None,
    ) -> None:
        """Evaluate at most so many candidates, the first at density `start` if one is given.

        Trials that earlier runs left undecided come first. What is left undecided then counts as failed. The search
        ends early when it is done, when `evaluate` returns None, before a candidate is evaluated twice, and when
        nothing passes and a trial is left undecided.
        """
        evaluated: list[Budgets] = []
        for _ in range(steps):
            undecided = [each.candidate for each in self.unsettled if each.candidate.budgets not in evaluated]
            if undecided:
                candidate = undecided[-1]
            elif self.is_done(decided=False):
                break
            else:
                candidate = self.candidates.at(self.next() if start is None or self.tried else max(self.least, start))
            trial = evaluate(candidate) if candidate.budgets not in evaluated else None
            if trial is None:
                break
            evaluated.append(candidate.budgets)
            self.learn(candidate, trial)
            if self.best is None and not trial.decided:
                break

    def next(self) -> float:
        """Return a density between the highest that failed and the lowest that passed."""
        failed, passed = self.bounds(decided=False)
        if failed is None and self.best is None:
            return max(self.least, min(MOST, max(self.first, self._expected(self.least, 1.0))))
        lowest = self.least if failed is None else failed
        expected = self._expected(lowest, passed)
        # The ends of the interval are already known. A trial close to one ends the search with either result.
        step = 1 + CLOSER * (self.fine - 1)
        if self.best is None:  # further up after each failure
            grown = 1.0 if lowest >= FIRST else max(expected, lowest * step ** (2 ** len(self.tried) - 1))
            return min(grown, math.sqrt(lowest), max(self.least, MOST))
        if failed is None:
            return max(self.least, min(expected, passed / max(step, BOLD)))
        self._guesses += 1
        nearest, farthest = lowest * max(step, (passed / lowest) ** INSIDE), passed / step
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
