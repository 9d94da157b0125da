# SPDX-License-Identifier: Apache-2.0
"""Predict the density at which the loss reaches the tolerance, so that few budgets are evaluated.

The costs of the heads predict a loss for every density, up to a factor. Each evaluated budget gives an estimate of the
factor. The next density is the one at which the scaled prediction is within the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dynaxx.lab.tune.result import Trial

FIRST = 0.5  # first density without any estimate
GUESSES = 2  # after two guesses, the prediction is inaccurate and bisection is faster
STEPS = 40  # bisection steps that solve for a density
CLOSER = 0.99  # relative distance of a guess from the end of an interval that ends the search


class Guide:
    """Predictor of the next density to evaluate, updated with each trial.

    Args:
        predicted: function from a density to its cost in nats per token, decreasing with the density.
        tolerance: allowed relative rise of perplexity.
        errors: number of standard errors added to a rise.
    """

    def __init__(self, predicted: Callable[[float], float], tolerance: float, errors: float) -> None:
        self._predicted, self._tolerance, self._errors = predicted, tolerance, errors
        self._factor: float | None = None
        self._error = 0.0
        self._far = math.inf  # distance from the tolerance of the trial that determined the factor
        self._guesses = 0

    def of(self, predicted: Callable[[float], float]) -> Guide:
        """Return a guide for other budgets of the same model that starts with this one's factor."""
        guide = Guide(predicted, self._tolerance, self._errors)
        guide._factor, guide._error, guide._far = self._factor, self._error, self._far
        return guide

    def learn(self, trials: Sequence[Trial]) -> None:
        """Update the factor if this trial's rise is closer to the tolerance; a rise close to zero is noise."""
        for trial in trials:
            predicted, rise = self._predicted(trial.aim), math.log(trial.ratio)
            if predicted > 0 and rise > 0:
                far = abs(math.log(rise / math.log1p(self._tolerance)))
                if far <= self._far:
                    self._factor, self._error, self._far = rise / predicted, trial.error, far

    def next(self, least: float, failed: float | None, passed: float, fine: float) -> float:
        """Return a density between the highest that failed and the lowest that passed.

        Args:
            least: the lowest possible density, which may be returned if none failed.
            failed: the highest density that failed, or None.
            passed: the lowest density that passed, or 1.
            fine: ratio of `passed` to `failed` at which the search ends.
        """
        lowest = least if failed is None else failed
        middle = math.sqrt(max(lowest, 1e-6) * passed)
        if self._factor is None:
            return FIRST if lowest < FIRST < passed else middle
        self._guesses += 1
        if self._guesses > GUESSES:
            return middle
        aim = math.log1p(self._tolerance) - self._errors * self._error
        low, high = lowest, passed
        for _ in range(STEPS):
            tried = (low + high) / 2
            low, high = (tried, high) if self._factor * self._predicted(tried) > aim else (low, tried)
        # The ends of the interval are already known. A trial close to one ends the search with either result.
        step = 1 + CLOSER * (fine - 1)
        nearest, farthest = lowest * (1.0 if failed is None else step), passed / step
        if nearest >= farthest:
            return least if failed is None else middle
        return min(max(high, nearest), farthest)
