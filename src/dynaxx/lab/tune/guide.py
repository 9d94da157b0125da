# SPDX-License-Identifier: Apache-2.0
"""Guess the density at which a budget reaches the tolerance, so that few budgets need to be evaluated.

The costs of the heads predict a loss for every density, right up to a factor. Each evaluated budget tells that factor;
the next guess is where the predicted loss, times the factor, is within the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dynaxx.lab.tune.result import Trial

FIRST = 0.5  # density to begin with where nothing is known
GUESSES = 2  # where two guesses were not enough the prediction is off, and halving is faster
STEPS = 40  # halvings of the interval in which a density is looked for
CLOSER = 0.99  # how close to the end of an interval that makes it fine enough


class Guide:
    """Returns the next density to evaluate; it learns from each trial.

    Args:
        predicted: nats per token that a density costs, falling with the density.
        tolerance: allowed relative rise of perplexity.
        errors: standard errors that are added to a rise.
    """

    def __init__(self, predicted: Callable[[float], float], tolerance: float, errors: float) -> None:
        self._predicted, self._tolerance, self._errors = predicted, tolerance, errors
        self._factor: float | None = None
        self._error = 0.0
        self._far = math.inf  # distance of the trial that gave the factor from the tolerance
        self._guesses = 0

    def of(self, predicted: Callable[[float], float]) -> Guide:
        """Return a guide for other budgets of the same model, which knows what this one learned."""
        guide = Guide(predicted, self._tolerance, self._errors)
        guide._factor, guide._error, guide._far = self._factor, self._error, self._far
        return guide

    def learn(self, trials: Sequence[Trial]) -> None:
        """Take the factor from the trial whose rise is closest to the tolerance: a rise of next to nothing is noise."""
        for trial in trials:
            predicted, rise = self._predicted(trial.density), math.log(trial.ratio)
            if predicted > 0 and rise > 0:
                far = abs(math.log(rise / math.log1p(self._tolerance)))
                if far <= self._far:
                    self._factor, self._error, self._far = rise / predicted, trial.error, far

    def next(self, least: float, failed: float | None, passed: float, fine: float) -> float:
        """Return a density between the densest that failed and the sparsest that passed.

        Args:
            least: the least possible density, which may be returned where nothing failed.
            failed: densest density that failed; None if none did.
            passed: sparsest density that passed, 1 if none did.
            fine: ratio of the two at which the search ends.
        """
        lowest = least if failed is None else failed
        middle = math.sqrt(max(lowest, 1e-6) * passed)
        if self._factor is None:
            return FIRST if lowest < FIRST < passed else (least if failed is None else middle)
        self._guesses += 1
        if self._guesses > GUESSES:
            return middle
        aim = math.log1p(self._tolerance) - self._errors * self._error
        low, high = lowest, passed
        for _ in range(STEPS):
            tried = (low + high) / 2
            low, high = (tried, high) if self._factor * self._predicted(tried) > aim else (low, tried)
        # An end of the interval is known already; just within it the search ends, whatever the trial says.
        step = 1 + CLOSER * (fine - 1)
        nearest, farthest = lowest * (1.0 if failed is None else step), passed / step
        if nearest >= farthest:
            return least if failed is None else middle
        return min(max(high, nearest), farthest)
