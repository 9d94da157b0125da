# SPDX-License-Identifier: Apache-2.0
"""Predict the loss of choices from the gradient alone, at equal pairs, without any trial."""

from itertools import pairwise

from benchmarks.quality.choices.trials import costs_of, mean_costs
from benchmarks.quality.choices.ways import GRIDS


def predicted(names, model, texts, amounts, baseline):
    """Yield the predicted loss of choices with one amount for all heads, and of the first choice at equal pairs.

    It takes one forward and one backward pass per text. The first choice is interpolated between its amounts, in the
    logarithm of the loss.
    """
    GRIDS["share"] = (*amounts, 1.0)
    for kind, each in texts.items():
        choices = list(dict.fromkeys(choice for several in names.values() for choice in several))
        costs = [costs_of(model, ids, choices, seed) for seed, ids in enumerate(each)]
        mean = mean_costs(dict(enumerate(costs)), list(range(len(costs))))
        curves = {
            name: list(zip(mean[choice][1].mean((1, 2)).tolist(), mean[choice][0].sum((1, 2)).tolist(), strict=True))[
                :-1
            ]
            for name, (choice, *_) in names.items()
        }
        for name, curve in curves.items():
            for (pairs, loss), amount in zip(curve, amounts, strict=True):
                base = at_equal_pairs(curves[baseline], pairs)
                yield {"kind": kind, "choice": name, "budget": amount, "pairs": f"{pairs:.1%}", "nats": loss,
                       "against": f"{loss / base - 1:+.0%}"}  # fmt: skip


def at_equal_pairs(curve, pairs):
    """Return the loss of a curve of (pairs, loss) at a number of pairs, log-linear, also beyond its ends."""
    for (a, x), (b, y) in pairwise(curve):
        if pairs <= b or (b, y) == curve[-1]:
            return x * (y / x) ** ((pairs - a) / (b - a))
    raise ValueError("a curve needs two points")
