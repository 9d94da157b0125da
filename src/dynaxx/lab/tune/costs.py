# SPDX-License-Identifier: Apache-2.0
"""The candidates of `dynaxx tune`, the cost of each for each head, and the best choice for a density."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.texts import float64
from dynaxx.layout import as_block_size
from dynaxx.patterns import LastQueries, LocalBlocks, Sink
from dynaxx.selection import Hybrid, MeanQuery, MinMax, Scorer, TileQueries, TopK, select_blocks


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
    """Find the best allocation for any mean density, the one with the smallest predicted loss.

    Each head has a few candidates with a density and a loss. On the lower convex hull of these points the gain per
    added block decreases. The greedy choice of the largest next gain is therefore optimal for every total that it
    reaches (Lagrange). The hull steps of all heads are sorted once, and every density is a prefix of them.

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
        for step in self._steps:
            if spent + step.density > density * self._heads + 1e-9:
                break
            choice[step.head] = step.candidate
            spent, loss = spent + step.density, loss - step.saved
        return Allocation(choice, spent / self._heads, loss)


BUDGETS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # budgets that heads choose from
LONG_TEXT = 16384  # tokens from which even the smallest step of `BUDGETS` is many blocks
LONG_BUDGETS = (
    *(0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1.0),
)  # with Gemma 3 270M, a seventh less loss at 32,768 tokens and 8 % of the blocks

FINER = 3  # steps from one measured budget to the next
SMALLEST_LOSS = 1e-30  # nats; only keeps logarithms finite

Budgets = list[list[float]]  # per layer and q head


SCORERS: dict[str, Scorer] = {"mean": MeanQuery(), "bounds": MinMax(bound=0.5), "tiles": TileQueries(8)}
DEFAULT_SCORERS = ("mean", "bounds")  # other engines and exports serve both
LOCAL_TOKENS = 128  # tokens up to each q block's end that are always visible, in at least two whole blocks


def scorers_named(names: Sequence[str]) -> tuple[Scorer, ...]:
    """Return the scorers with these names without duplicates.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    unknown = [name for name in names if name not in SCORERS]
    if unknown or not names:
        raise ValueError(f"`scorers` must be some of {', '.join(SCORERS)}, got {', '.join(unknown) or 'none'}")
    return tuple(SCORERS[name] for name in dict.fromkeys(names))


def rule_of(
    scorer: Scorer,
    budget: float | tuple[float, ...],
    block_size: int | tuple[int, int],
    last_queries: int,
    floor: int,
) -> Hybrid:
    """Return the rule of a policy with one budget for all heads, or one per head.

    Args:
        scorer: the scorer of blocks.
        budget: share of a row's blocks.
        block_size: tokens per block, or (q_block, kv_block).
        last_queries: last queries that see everything.
        floor: `TopK.floor`.
    """
    kv_block = as_block_size(block_size)[1]
    pattern = Sink(kv_block) | LocalBlocks(max(2, LOCAL_TOKENS // kv_block)) | LastQueries(last_queries)
    return Hybrid(pattern, TopK(budget, scorer, floor, per="head"))


def density_of(rule: Hybrid, tokens: int, block_size: int | tuple[int, int]) -> float:
    """Return the visited over the causally visible blocks of a rule's head; it does not depend on the text."""
    x = torch.randn(1, tokens, 1, 8, dtype=torch.float32, device="cpu")
    layout = select_blocks(x, x, rule, block_size=block_size)
    return float(layout.kv_num_blocks.sum()) / max(1, layout.grid().visible_blocks())


def budgets_for(tokens: int) -> tuple[float, ...]:
    """Return the budgets that heads choose from on texts of so many tokens."""
    return LONG_BUDGETS if tokens >= LONG_TEXT else BUDGETS


class Costs(NamedTuple):
    """The cost of every candidate for every head, by scorer. Each tensor is (budgets, layers * heads)."""

    layers: tuple[int, ...]
    density: dict[Scorer, Tensor]
    loss: dict[Scorer, Tensor]
    values: tuple[float, ...] = BUDGETS  # the budgets

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return next(iter(self.density.values())).shape[1] // len(self.layers)

    def budgets(self, choice: Tensor) -> Budgets:
        """Return the budgets of each layer's heads in an allocation."""
        return float64(self.values)[choice].view(len(self.layers), self.heads).tolist()

    def finer(self, scorer: Scorer) -> Costs:
        """Return the costs of one scorer with interpolated budgets between the measured ones.

        Logarithms of losses are interpolated over budgets; next to 0 and 1, where a loss may be 0, losses are.
        """
        density, loss = self.density[scorer], self.loss[scorer]
        values, densities, losses = [self.values[0]], [density[0]], [loss[0]]
        for index, (low, high) in enumerate(pairwise(self.values)):
            for step in range(1, FINER + 1):
                share = step / FINER
                values.append(round(low + (high - low) * share, 4))
                densities.append(torch.lerp(density[index], density[index + 1], share))
                if low > 0.0 and high < 1.0:
                    ends = loss[index : index + 2].clamp_min(SMALLEST_LOSS).log()
                    losses.append(torch.lerp(ends[0], ends[1], share).exp())
                else:
                    losses.append(torch.lerp(loss[index], loss[index + 1], share))
        fine = {scorer: torch.stack(densities)}, {scorer: torch.stack(losses)}
        return Costs(self.layers, *fine, tuple(values))

    @staticmethod
    def mean(costs: Sequence[Costs]) -> Costs:
        """Return the mean cost and the mean density over several texts."""
        mean = lambda tensors: torch.stack(tensors).mean(0)
        return Costs(
            costs[0].layers,
            {scorer: mean([each.density[scorer] for each in costs]) for scorer in costs[0].density},
            {scorer: mean([each.loss[scorer] for each in costs]) for scorer in costs[0].loss},
            costs[0].values,
        )


def interpolate(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate y linearly at x, clamped, for ascending xs."""
    if at <= xs[0]:
        return ys[0]
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / max(x1 - x0, 1e-12)
    return ys[-1]
