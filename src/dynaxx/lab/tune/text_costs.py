# SPDX-License-Identifier: Apache-2.0
"""The costs of heads on the texts of a search: measured as far as time allows, and stored layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.progress import Progress
from dynaxx.lab.resume import Steps
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune.sensitivity import HeadCosts, measure_head_costs
from dynaxx.selection import Hybrid, Scorer

logger = logging.getLogger("dynaxx")

LAYERS = "costs of layers"  # kinds of work, see `TimeBudget`
GRADIENT = "gradient"
LAYER_SHARE = 2.0  # seconds of one scorer's costs in all layers, over those of a forward pass, before one was measured
PASSES = 3.0  # seconds of the forward and backward pass, over those of a forward pass


class TextCosts:
    """Measures and stores the costs of heads.

    Args:
        model: the model.
        layers: layers that see their whole context.
        steps: stored results of this run and of runs before it.
        time: the time budget.
        progress: reports each layer.
        block_size: tokens per block, or (q_block, kv_block).
        seed: seed of the sampled tokens of the gradient.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        steps: Steps,
        time: TimeBudget,
        progress: Progress,
        block_size: int | tuple[int, int],
        seed: int,
    ) -> None:
        if not layers:
            raise ValueError("no layer of this model sees its whole context, so there is nothing to make sparse")
        self._model, self.layers, self._steps = model, tuple(layers), steps
        self._time, self._progress = time, progress
        self._block_size, self._seed = block_size, seed

    def missing(self, name: str, scorer: Scorer, budgets: Sequence[float]) -> list[int]:
        """Return the layers whose costs on a text are not stored."""
        return [layer for layer in self.layers if _key(name, scorer, budgets, layer) not in self._steps]

    def measured(self, name: str, scorer: Scorer, budgets: Sequence[float]) -> int:
        """Return the number of layers whose costs on a text are stored."""
        return len(self.layers) - len(self.missing(name, scorer, budgets))

    def seconds(self, tokens: int, pass_seconds: float, scorers: int, layers: int) -> float:
        """Return the expected seconds of measuring so many layers.

        A layer takes some of a forward pass before one was measured.
        """
        each = self._time.expects(LAYERS, tokens) or LAYER_SHARE * pass_seconds / len(self.layers)
        return (self._time.expects(GRADIENT, tokens) or PASSES * pass_seconds) + scorers * layers * each

    def measure(
        self,
        name: str,
        ids: Tensor,
        scorers: Sequence[Scorer],
        budgets: Sequence[float],
        rule: Callable[[float, Scorer], Hybrid],
        last: int | None = None,
    ) -> bool:
        """Measure the costs of the scorers in the layers that miss them, while time allows; return whether all are.

        Args:
            name: the text.
            ids: (1, N) its tokens.
            scorers: scorers to measure together.
            budgets: budgets to measure.
            rule: the rule of a budget and a scorer.
            last: see `measure_head_costs`.
        """
        layers = sorted({layer for scorer in scorers for layer in self.missing(name, scorer, budgets)})
        if not layers:
            return True
        tokens, found = ids.shape[1] - 1, list[HeadCosts]()
        with self._progress.task(f"Measuring the loss of each head{name}", total=len(layers)) as task:

            def done(costs: HeadCosts) -> None:
                found.append(costs)
                for scorer, loss in zip(scorers, costs.loss.chunk(len(scorers)), strict=True):
                    self._steps.store(_key(name, scorer, budgets, costs.layer), loss.tolist())
                task.advance(1, f"layer {costs.layer}")

            began = self._time.spent
            with self._time.clock.work(GRADIENT, tokens):
                measure_head_costs(
                    self._model,
                    ids,
                    [rule(budget, scorer) for scorer in scorers for budget in budgets],
                    block_size=self._block_size,
                    seed=self._seed,
                    last=last,
                    layers=layers,
                    done=done,
                    layer_work=lambda: self._time.work(LAYERS, tokens),
                    go_on=lambda: self._time.allows(self._time.expects(LAYERS, tokens)),
                )
            passes = self._time.spent - began - len(found) * self._time.expects(LAYERS, tokens)
            self._time.learn(GRADIENT, tokens, max(0.0, passes))
        return len(found) == len(layers)

    def of(self, name: str, scorers: Sequence[Scorer], budgets: Sequence[float]) -> dict[Scorer, Tensor] | None:
        """Return the stored losses (budgets, layers * heads) of each scorer; missing layers get the mean of the others.

        None if no layer of a scorer is stored.
        """
        found: dict[Scorer, Tensor] = {}
        for scorer in scorers:
            stored = [self._steps.get(_key(name, scorer, budgets, layer)) for layer in self.layers]
            if not any(stored):
                return None
            rows = [torch.tensor(each, dtype=torch.float64, device="cpu") if each else None for each in stored]
            mean = torch.stack([row for row in rows if row is not None]).mean(0)
            found[scorer] = torch.cat([mean if row is None else row for row in rows], dim=1)
        return found


def _key(name: str, scorer: Scorer, budgets: Sequence[float], layer: int) -> str:
    return f"costs{name} of {len(budgets)} budgets by {scorer!r} in layer {layer}"
