# SPDX-License-Identifier: Apache-2.0
"""Measure what budgets cost each head, with the best scorer, as far as time allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.transformers.apply_policy import full_attention_layers
from dynaxx.lab.kinds import label
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.texts import float64
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.costs import Allocator, Costs, budgets_for, density_of, scorers_named
from dynaxx.lab.tune.density.held_tasks import COST_SAMPLES, HeldTasks
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.density.search_texts import SearchTexts, search_texts
from dynaxx.lab.tune.density.trials import ERRORS, Trials, rise_of
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import KindTrial
from dynaxx.lab.tune.sensitivity import HeadCosts, measure_head_costs
from dynaxx.layout import as_block_size
from dynaxx.selection import Hybrid, Scorer

SCORER_DENSITY = 0.25  # density at which the best scorer is determined
COSTS_SHARE = 0.1  # largest expected share of the time left for costs of more than one scorer
COSTS_MOST = 0.25  # largest expected share of the whole budget for the costs of one scorer on texts that can be shorter
MANY_ROWS = 64  # rows of blocks of a text from which every second one tells the costs
COSTS_BLOCKS = 16  # blocks of these texts, at least, since the latest 128 tokens of each query are always visible

LAYERS = "costs of layers"  # kinds of work, see `TimeBudget`
GRADIENT = "gradient"
LAYER_SHARE = 2.0  # seconds of one scorer's costs in all layers, over those of a forward pass, before one was measured
PASSES = 3.0  # seconds of the forward and backward pass, over those of a forward pass


class Costing:
    """One run of the search: its texts, its stored steps, its time, and the costs of its heads."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        kinds: Mapping[str, str],
        options: TuneOptions,
        progress: Progress | None = None,
        time: TimeBudget | None = None,
    ) -> None:
        self.model, self.tokenizer, self.text, self.options = model, tokenizer, text, options
        self.scorers = scorers_named(options.scorers)
        self.progress, self.time = progress or SilentProgress(), time or TimeBudget(options.time_budget)
        self.before = self.time.spent  # seconds of the command before the search, which another run takes too
        self.texts: SearchTexts = search_texts(tokenizer, text, kinds, options.tokens, options.stretches)
        self.budgets = budgets_for(options.tokens)
        self.cost_tokens = options.cost_tokens or options.tokens
        settings = dict(tokens=options.tokens, block_size=options.block_size, seed=options.seed)
        key = fingerprint(model, self.texts.key(), **settings)
        self.steps = Steps(options.out / "tuning_state.jsonl", key, options.resume)
        self.hold = None
        if options.hold:
            self.hold = HeldTasks(model, tokenizer, text, options, self.steps.remember, self.time.allows)
        self.trials = Trials(model, self.texts, self.steps, options, self.hold, self.time)
        self.block_size = self.trials.block_size
        self.layers = tuple(full_attention_layers(model))  # layers that see their whole context
        if not self.layers:
            raise ValueError("no layer of this model sees its whole context, so there is nothing to make sparse")
        self.scorer = self.scorers[0]
        self.cut = False  # whether anything was left out for lack of time

    def _shorten_costs(self) -> None:
        """Halve the texts for costs until one scorer's fit well into the budget, unless some length was measured."""
        fewest = COSTS_BLOCKS * as_block_size(self.block_size)[1]
        lengths = [self.options.cost_tokens or self.options.tokens]
        while self.time.seconds is not None and lengths[-1] >= 2 * fewest:
            lengths.append(lengths[-1] // 2)
        expected = {}
        for self.cost_tokens in lengths:
            missing = self._missing(self._name(0), self.scorers[0])
            if not missing:
                return
            expected[self.cost_tokens] = self._costs_seconds(1, len(missing))
        most = COSTS_MOST * (self.time.seconds or math.inf)
        self.cost_tokens = next((length for length, seconds in expected.items() if seconds <= most), lengths[-1])

    def _has_time(self, seconds: float, urgent: bool = False) -> bool:
        """Return whether work of so many seconds fits; if not, the search is cut short. Stored work takes none."""
        fits = seconds == 0.0 or self.time.allows(seconds, urgent)
        self.cut |= not fits
        return fits

    def _costs_by_kind(self, rises: Rises, task: Task) -> dict[str, Costs] | None:
        """Return the costs of the best scorer on each kind of text, the means over its stretches.

        None if time ended before each kind was measured in at least one layer.
        """
        task.advance(0, "the loss of each head")
        scorers, stretches = list(self.scorers), self.texts.costs
        tried = [each for each in scorers if self.steps.names(stored_trials("tuned", each))]
        missing = [each for each in scorers if self._missing(self._name(0), each)]
        if self.time.seconds is not None and tried:  # go on with the scorer of an earlier run
            scorers = tried[-1:]
        elif len(scorers) > 1 and missing and self._costs_seconds(len(missing)) > COSTS_SHARE * self.time.left:
            scorers = [each for each in scorers if each not in missing] or scorers[:1]
        if not self._measure(0, scorers):
            return None
        self.scorer = self._best_scorer(scorers, rises, task)
        by_kind: dict[str, list[Costs]] = {}
        for index, stretch in enumerate(stretches):
            if index == 0 or self._measure(index, [self.scorer]):
                found = self._costs(self._name(index), [self.scorer])
                by_kind.setdefault(stretch.kind, []).extend([found] if found else [])
        if set(by_kind) != set(self.texts.kinds):
            return None
        return {kind: Costs.mean(each) for kind, each in by_kind.items()}

    def _costs_seconds(self, scorers: int, layers: int | None = None) -> float:
        """Return the expected seconds of measuring some layers, all by default, on one of the texts.

        A layer takes some of a forward pass before one was measured.
        """
        tokens, layers = self.cost_tokens, layers or len(self.layers)
        one_pass = self.time.expects(PASS, tokens)
        each = self.time.expects(LAYERS, tokens) or LAYER_SHARE * one_pass / len(self.layers)
        return (self.time.expects(GRADIENT, tokens) or PASSES * one_pass) + scorers * layers * each

    def _missing(self, name: str, scorer: Scorer) -> list[int]:
        """Return the layers whose costs on a text are not stored."""
        return [layer for layer in self.layers if self._key(name, scorer, layer) not in self.steps]

    def _key(self, name: str, scorer: Scorer, layer: int) -> str:
        return f"costs{name} of {len(self.budgets)} budgets by {scorer!r} in layer {layer}"

    def _measure(self, index: int, scorers: Sequence[Scorer]) -> bool:
        """Measure the costs on one text as far as time allows; return whether those of any layer are known."""
        name, ids = self._name(index), self.texts.costs[index].ids[:, : self.cost_tokens + 1]
        missing = [each for each in scorers if self._missing(name, each)]
        if missing and self._has_time(self._costs_seconds(len(missing), 1)):
            rule = partial(self.trials.rule, tokens=self.cost_tokens)
            self.cut |= not self._measure_on(name, ids, missing, rule)
        return self._losses(name, scorers) is not None

    def _measure_on(
        self,
        name: str,
        ids: Tensor,
        scorers: Sequence[Scorer],
        rule: Callable[[float, Scorer], Hybrid],
        last: int | None = None,
    ) -> bool:
        """Measure and store the costs in the layers that miss them, while time allows; return whether all are known.

        Args:
            name: the text.
            ids: (1, N) its tokens.
            scorers: scorers to measure together.
            rule: the rule of a budget and a scorer.
            last: see `measure_head_costs`.
        """
        layers = sorted({layer for scorer in scorers for layer in self._missing(name, scorer)})
        tokens, found = ids.shape[1] - 1, list[HeadCosts]()
        with self.progress.task(f"Measuring the loss of each head{name}", total=len(layers)) as task:

            def done(costs: HeadCosts) -> None:
                found.append(costs)
                for scorer, loss in zip(scorers, costs.loss.chunk(len(scorers)), strict=True):
                    self.steps.store(self._key(name, scorer, costs.layer), loss.tolist())
                task.advance(1, f"layer {costs.layer}")

            began = self.time.spent
            with self.time.clock.work(GRADIENT, tokens):
                measure_head_costs(
                    self.model,
                    ids,
                    [rule(budget, scorer) for scorer in scorers for budget in self.budgets],
                    block_size=self.block_size,
                    seed=self.options.seed,
                    last=last,
                    every=1 if last is not None or tokens < MANY_ROWS * as_block_size(self.block_size)[0] else 2,
                    layers=layers,
                    done=done,
                    layer_work=lambda: self.time.work(LAYERS, tokens),
                    go_on=lambda: self.time.allows(self.time.expects(LAYERS, tokens)),
                )
            passes = self.time.spent - began - len(found) * self.time.expects(LAYERS, tokens)
            self.time.learn(GRADIENT, tokens, max(0.0, passes))
        return len(found) == len(layers)

    def _losses(self, name: str, scorers: Sequence[Scorer]) -> dict[Scorer, Tensor] | None:
        """Return the stored losses (budgets, layers * heads) of each scorer; missing layers get the mean of the others.

        None if no layer of a scorer is stored.
        """
        found: dict[Scorer, Tensor] = {}
        for scorer in scorers:
            stored = [self.steps.get(self._key(name, scorer, layer)) for layer in self.layers]
            if not any(stored):
                return None
            rows = [float64(each) if each else None for each in stored]
            mean = torch.stack([row for row in rows if row is not None]).mean(0)
            found[scorer] = torch.cat([mean if row is None else row for row in rows], dim=1)
        return found

    def _costs(self, name: str, scorers: Sequence[Scorer]) -> Costs | None:
        """Return the stored losses on a text, with the densities of the budgets on texts of the trials' length."""
        losses = self._losses(name, scorers)
        if losses is None:
            return None
        densities = {}
        for scorer in scorers:
            rules = [self.trials.rule(budget, scorer) for budget in self.budgets]
            shares = [density_of(rule, self.options.tokens, self.block_size) for rule in rules]
            column = float64(shares)[:, None]
            densities[scorer] = column.expand_as(losses[scorer])
        return Costs(self.layers, densities, losses, self.budgets)

    def _task_costs(self) -> Costs | None:
        """Return the mean costs on prompts of the tasks that must hold, by the predictions of the answers.

        If time runs out, the mean is over the prompts until then. None if there are none.
        """
        if self.hold is None:
            return None
        found = list[Costs]()
        for number, task in itertools.product(range(COST_SAMPLES), self.hold.tasks):
            name = f" on {task} {number}"
            if self._missing(name, self.scorer):
                if not self._has_time(self._costs_seconds(1)):
                    break
                sample = self.hold.for_costs(task, number)
                ids = torch.cat([sample.prompt, sample.answer[None]], dim=1)
                self._measure_on(name, ids, [self.scorer], self.trials.rule, last=len(sample.answer))
            costs = self._costs(name, [self.scorer])
            found += [costs] if costs is not None else []
        return Costs.mean(found) if found else None

    def _name(self, index: int) -> str:
        """Return the name of a text for costs, as a part of a sentence."""
        part = "" if self.cost_tokens == self.options.tokens else f", {self.cost_tokens:,} tokens"
        return f" on {label(self.texts.costs[index].kind)} {index}{part}"

    def _best_scorer(self, scorers: Sequence[Scorer], rises: Rises, task: Task) -> Scorer:
        """Return the scorer with the smallest predicted loss at one density, or one that measurably loses less.

        The first text for costs predicts and gives the budgets, and the first text for trials measures. A single text
        is noisy, so the measurement decides only by `ERRORS` standard errors. If time is short, the prediction
        decides. What the best scorer lost is the first estimate of `rises`.
        """
        if len(scorers) == 1:
            return scorers[0]
        costs = self._costs(self._name(0), scorers)
        assert costs is not None
        found = {scorer: Allocator(costs.density[scorer], costs.loss[scorer]).at(SCORER_DENSITY) for scorer in scorers}
        best = min(scorers, key=lambda scorer: found[scorer].loss)
        budgets = {scorer: costs.budgets(each.choice) for scorer, each in found.items()}
        keys = {scorer: self.trials.key(each, scorer) for scorer, each in budgets.items()}
        missing = sum(f"{key} 0" not in self.steps for key in keys.values())
        if missing and not self.time.allows(missing * self.trials.pass_seconds / COSTS_SHARE):
            return best
        dense, kind = self.trials.dense(0).double(), self.texts.search[0].kind
        changes: dict[Scorer, Tensor] = {}
        for scorer in scorers:
            policy = self.trials.policy(costs.layers, budgets[scorer], scorer)
            losses = self.trials.remembered(keys[scorer], policy, 0)["losses"]
            changes[scorer] = float64(losses) - dense
            said = f"perplexity {changes[scorer].mean():+.2%} at {found[scorer].density:.0%} of the blocks"
            task.advance(0, f"{scorer!r}: {said}")
        measured = min(scorers, key=lambda scorer: float(changes[scorer].mean()))
        gained = rise_of([changes[best] - changes[measured]])
        if gained.mean > ERRORS * gained.error(1):
            best = measured
        rise, tokens = rise_of([changes[best]]), changes[best].numel()
        rises.learn({kind: found[best].loss}, [KindTrial(kind, math.exp(rise.mean), rise.error(1), True, tokens)])
        return best


def stored_trials(name: str, scorer: Scorer) -> str:
    """Return the start of the names of the stored trials of a search."""
    return f"tried {name} by {scorer!r} "
