# SPDX-License-Identifier: Apache-2.0
"""Detect drift: attention whose distribution differs from the policy's reference profile, per layer and head.

The test is the two-sample test of Kolmogorov and Smirnov between the calls of the reference and one window of running
calls. Windows do not overlap. Distances are taken at the edges of the profile's bins, which can only make them smaller,
so the p-values (Kolmogorov's limit with Stephens' correction for small samples) err towards "no drift". One bound holds
for all heads, statistics and layers together (Bonferroni). A layer has drifted once several windows in a row exceed it.
The population stability index tells a reader the size of the change; no decision depends on it.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from torch import Tensor

from dynaxx.policy.document import Document, Positive, Share
from dynaxx.policy.profile import STATISTICS, LayerRecord, Profile, midpoints


class Drift(Document):
    """The settings that define when running attention counts as drifted from the reference profile.

    A lasting change is found at most `(confirm + 1) * window` sampled calls of a layer after it began, if it moves the
    distribution of any head far enough to show in one window. `false_alarms` bounds the probability that one round of
    windows (one window per layer) reports a change although nothing changed. Drift is reported after `confirm` such
    windows in a row.
    """

    former_names: ClassVar[dict[str, str]] = {"least_distance": "min_distance"}
    window: Positive = 64  # sampled calls of a layer
    false_alarms: Share = 0.001
    confirm: Positive = 2  # windows in a row
    min_distance: Share = 0.2  # smaller distances never count as drift


class HeadDrift(NamedTuple):
    """A statistic of one head whose distribution moved."""

    layer: int
    head: int
    statistic: str
    distance: float  # Kolmogorov-Smirnov, 0 to 1
    p_value: float
    stability_index: float
    reference_mean: float
    running_mean: float

    def __str__(self) -> str:
        """Return a line with both means, the distance and its p-value."""
        return (
            f"layer {self.layer} head {self.head}: {self.statistic} {self.reference_mean:.3f} -> "
            f"{self.running_mean:.3f}, distance {self.distance:.2f} (p = {self.p_value:.1e}, "
            f"stability index {self.stability_index:.2f})"
        )


class LayerDrift(NamedTuple):
    """The result of the test on one window of a layer."""

    layer: int
    ratio: float  # distance of the worst head over the smallest distance that counts; >= 1 counts as drift
    drifted: bool  # confirmed by the windows before it
    evidence: tuple[HeadDrift, ...]  # heads beyond the bound, worst first


class DriftDetector:
    """Compare running calls with a reference, layer by layer.

    Args:
        reference: the policy's profile.
        settings: see `Drift`.
    """

    def __init__(self, reference: Profile, settings: Drift) -> None:
        self.settings = settings
        self.drifted: dict[int, LayerDrift] = {}  # drifted layers with the evidence
        self._reference = {each.layer: each.counts() for each in reference.layers if each.calls}
        self._windows = {layer: LayerRecord(counts.shape[1]) for layer, counts in self._reference.items()}
        self._in_a_row = dict.fromkeys(self._reference, 0)

    def add(self, layer: int, values: Tensor) -> LayerDrift | None:
        """Add the (statistics, heads) shares of one sampled call; return the result if it completes a window."""
        window = self._windows.get(layer)
        if window is None:
            return None
        window.add(values)
        if window.calls < self.settings.window:
            return None
        evidence, ratio = self._test(layer, window)
        window.clear()
        self._in_a_row[layer] = self._in_a_row[layer] + 1 if evidence else 0
        found = LayerDrift(layer, ratio, self._in_a_row[layer] >= self.settings.confirm, evidence)
        if found.drifted:
            self.drifted[layer] = found
        elif not evidence:
            self.drifted.pop(layer, None)
        return found

    def _test(self, layer: int, window: LayerRecord) -> tuple[tuple[HeadDrift, ...], float]:
        reference = self._reference[layer]
        tests = len(self._reference) * reference.shape[0] * reference.shape[1]
        bound = self.settings.false_alarms / tests
        before, now = int(reference[0, 0].sum()), window.calls
        least = max(self.settings.min_distance, critical_distance(bound, before, now))
        distance = ks_distance(reference, window.counts)
        evidence = []
        for statistic, head in (distance >= least).nonzero().tolist():
            old, new = reference[statistic, head], window.counts[statistic, head]
            far = float(distance[statistic, head])
            p_value = ks_p_value(far, before, now)
            means = (float((counts / counts.sum() * midpoints()).sum()) for counts in (old, new))
            index = stability_index(old, new)
            evidence.append(HeadDrift(layer, head, STATISTICS[statistic], far, p_value, index, *means))
        return tuple(sorted(evidence, key=lambda each: -each.distance)), float(distance.max()) / least


def ks_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference of the cumulative shares of two histograms, (..., bins) to (...)."""
    cumulative = [(counts.double() / counts.sum(-1, keepdim=True)).cumsum(-1) for counts in (a, b)]
    return (cumulative[0] - cumulative[1]).abs().amax(-1)


def ks_p_value(distance: float, first: int, second: int) -> float:
    """Return the probability of such a distance between two samples of these sizes from one distribution.

    This is Kolmogorov's limit at Stephens' corrected argument (Stephens 1970, as in Numerical Recipes 14.3).
    """
    root = math.sqrt(first * second / (first + second))
    at = (root + 0.12 + 0.11 / root) * distance
    if at < 0.2:  # the value is close to 1, and the series converges slowly
        return 1.0
    total = sum((-1) ** (term - 1) * math.exp(-2 * (term * at) ** 2) for term in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


def critical_distance(p_value: float, first: int, second: int) -> float:
    """Return the smallest distance with at most this p-value, or 1 if there is none."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if ks_p_value(middle, first, second) <= p_value else (middle, high)
    return high


def stability_index(reference: Tensor, running: Tensor) -> float:
    """Return the population stability index of two (bins,) histograms, with half a count added to each bin.

    By convention a value below 0.1 means stable, and one above 0.25 means shifted.
    """
    p, q = ((counts + 0.5) / (counts + 0.5).sum() for counts in (reference.double(), running.double()))
    return float(((q - p) * (q / p).log()).sum())
