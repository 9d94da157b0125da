# SPDX-License-Identifier: Apache-2.0
"""Distribute one density among many heads so that the predicted loss is smallest.

Each head has a few candidates with a density and a loss. On the lower convex hull of these points the gain per added
block decreases. The greedy choice of the largest next gain is therefore optimal for every total that it reaches
(Lagrange). The hull steps of all heads are sorted once, and every density is a prefix of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class HullStep(NamedTuple):
    """The step of one head to its next candidate on the hull."""

    gain: float  # predicted loss saved per unit of density
    head: int
    candidate: int
    density: float  # increase of the head's density
    saved: float


class Allocation(NamedTuple):
    """The candidate that each head takes, and the predicted loss."""

    choice: Tensor  # (heads,) int64
    density: float  # mean over heads
    loss: float  # sum over heads, nats per token
    price: float  # loss that the next step would save per unit of one head's density; 0 if there is none


def lower_hull(density: Sequence[float], loss: Sequence[float]) -> list[int]:
    """Return the indices of the points on the lower convex hull with decreasing losses, by ascending density."""
    hull: list[int] = []
    for point in sorted(range(len(density)), key=lambda i: (density[i], loss[i])):
        if hull and loss[point] >= loss[hull[-1]]:
            continue
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            before = (loss[a] - loss[b]) * (density[point] - density[b])
            if before > (loss[b] - loss[point]) * (density[b] - density[a]):
                break
            hull.pop()
        if len(hull) == 1 and density[point] == density[hull[0]]:
            hull.pop()
        hull.append(point)
    return hull


class Allocator:
    """Find the best allocation for any mean density.

    Args:
        density: (candidates, heads), with the heads of all layers side by side.
        loss: (candidates, heads).
    """

    def __init__(self, density: Tensor, loss: Tensor) -> None:
        self._heads = density.shape[1]
        hulls = [lower_hull(density[:, head].tolist(), loss[:, head].tolist()) for head in range(self._heads)]
        self._start = torch.tensor([hull[0] for hull in hulls], dtype=torch.int64, device="cpu")
        every = torch.arange(self._heads, device="cpu")
        self._least = float(density[self._start, every].sum()), float(loss[self._start, every].sum())
        steps = []
        for head, hull in enumerate(hulls):
            for a, b in pairwise(hull):
                more, saved = float(density[b, head] - density[a, head]), float(loss[a, head] - loss[b, head])
                steps.append(HullStep(saved / max(more, 1e-12), head, b, more, saved))
        self._steps = sorted(steps, key=lambda step: -step.gain)  # stable, so that the steps of a head stay in order

    @property
    def least_density(self) -> float:
        """The mean density when every head has its cheapest candidate."""
        return self._least[0] / self._heads

    def at(self, density: float) -> Allocation:
        """Return the best allocation with at most this mean density, which is at least `least_density`."""
        choice, (spent, loss) = self._start.clone(), self._least
        price = 0.0
        for step in self._steps:
            if spent + step.density > density * self._heads + 1e-9:
                price = step.gain
                break
            choice[step.head] = step.candidate
            spent, loss = spent + step.density, loss - step.saved
        return Allocation(choice, spent / self._heads, loss, price)
