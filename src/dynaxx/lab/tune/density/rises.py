# SPDX-License-Identifier: Apache-2.0
"""Predict the rise of perplexity of a candidate on each kind of text, from the rises that trials measured.

The costs of heads predict the rise of a kind up to a factor. The factor of a kind is a least-squares estimate over all
trials of that kind, weighted by their errors. Its prior is the factor of all kinds together, so that one noisy trial of
one kind does not decide. That factor has a prior too: 1, what a second-order expansion of the loss says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dynaxx.lab.tune.result import KindTrial

MIN_COMMON = 0.05  # smallest factor of all kinds together
SPREAD = 0.5  # standard deviation of the factors of kinds
MISFIT = 0.1  # relative error of a prediction beside the error of the measurement
MIN_FACTOR = 0.05  # smallest factor of a kind, over that of all kinds together; a rise below zero is noise


class Point(NamedTuple):
    """One measured rise of one kind."""

    predicted: float
    rise: float  # nats per token
    error: float
    tokens: int


class Rises:
    """Measured rises by kind, and predictions from them.

    Args:
        tolerance: allowed relative rise of perplexity.
        errors: number of standard errors added to a rise.
        tokens: number of tokens that a trial may use, by kind.
        share: returns the share of these tokens that a trial is expected to use.
    """

    def __init__(
        self, tolerance: float, errors: float, tokens: Mapping[str, int], share: Callable[[], float] = lambda: 1.0
    ) -> None:
        self.limit, self._errors, self._tokens, self._share = math.log1p(tolerance), errors, dict(tokens), share
        self._points: dict[str, list[Point]] = {}

    def again(self) -> Rises:
        """Return a copy, for candidates of another form."""
        return self.without("")

    def without(self, kind: str) -> Rises:
        """Return a copy without the rises of one kind."""
        found = Rises(math.expm1(self.limit), self._errors, self._tokens, self._share)
        found._points = {each: list(points) for each, points in self._points.items() if each != kind}
        return found

    def learn(self, predicted: Mapping[str, float], rows: Sequence[KindTrial]) -> None:
        """Add the rises of one trial."""
        for row in rows:
            if predicted.get(row.kind, 0.0) > 0:
                point = Point(predicted[row.kind], math.log(row.ratio), max(row.error, 1e-7), max(row.tokens, 1))
                self._points.setdefault(row.kind, []).append(point)

    def upper(self, predicted: Mapping[str, float]) -> dict[str, float]:
        """Return the expected rise of each kind in nats, plus its errors. It passes up to `limit`."""
        common = self._common()
        return {
            kind: self._factor(kind, common) * loss + self._errors * self._error(kind, loss)
            for kind, loss in predicted.items()
        }

    def passes(self, predicted: Mapping[str, float]) -> bool:
        """Return whether a candidate is expected to pass on every kind."""
        return all(each <= self.limit for each in self.upper(predicted).values())

    def _common(self) -> float:
        """Return the factor of all kinds together."""
        above, below = _sums([point for each in self._points.values() for point in each])
        return max((above + 1.0) / (below + 1.0), MIN_COMMON)

    def _factor(self, kind: str, common: float) -> float:
        above, below = _sums(self._points.get(kind, []))
        prior = 1.0 / SPREAD**2
        return max((above + prior * common) / (below + prior), MIN_FACTOR * common)

    def _error(self, kind: str, predicted: float) -> float:
        """Return the standard error of the next trial; it grows with the square root of the loss.

        The trial has as much text as time allows, or is compared with the one that had most, whose error tells.
        """
        points = self._points.get(kind) or [point for each in self._points.values() for point in each]
        if not points:
            return 0.0
        most = max(point.tokens for point in points)
        each = [point.error * math.sqrt(most / point.predicted) for point in points if point.tokens == most]
        return statistics.median(each) * math.sqrt(predicted / max(most, self._share() * self._tokens.get(kind, 1)))


def _sums(points: Sequence[Point]) -> tuple[float, float]:
    """Return the weighted sums of rise x predicted and of predicted squared."""
    above = below = 0.0
    for point in points:
        variance = point.error**2 + (MISFIT * point.rise) ** 2
        above += point.predicted * point.rise / variance
        below += point.predicted**2 / variance
    return above, below
