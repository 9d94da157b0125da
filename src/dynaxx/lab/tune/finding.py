# SPDX-License-Identifier: Apache-2.0
"""Search the scorer and the budgets of the heads, at any time the best ones so far.

Every step is stored, good or bad, and the next search with the same settings starts from all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.transformers.apply_policy import full_attention_layers
from dynaxx.lab.kinds import label
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import Costs, budgets_for, density_of, scorers_named
from dynaxx.lab.tune.density.candidates import Candidate, TunedCandidates, UniformCandidates
from dynaxx.lab.tune.density.guide import FIRST, Guide, Tried
from dynaxx.lab.tune.density.held_tasks import COST_SAMPLES, HeldTasks
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.density.search_texts import SearchTexts, search_texts
from dynaxx.lab.tune.density.trials import ERRORS, FUTILE, Trials, mean_and_error
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import HeldOutKind, KindTrial, Trial
from dynaxx.lab.tune.text_costs import TextCosts
from dynaxx.layout import as_block_size
from dynaxx.selection import Scorer

SEARCH_STEPS = 10  # trials of budgets per head in one run, at most
UNIFORM_STEPS = 6  # trials of one budget for all heads, at most
SCORER_DENSITY = 0.25  # density at which the best scorer is determined
FINE_ENOUGH = 1.02  # ratio of the passing to the failing density at which a search ends
UNIFORM_FINE = 1.15  # the same for one budget for all heads, which only shows what budgets per head gain
TRIALS = 3  # trials that the texts of early ones are sized for
COSTS_SHARE = 0.25  # largest expected share of the time left for costs of more than one scorer
COSTS_MOST = 0.25  # largest expected share of the whole budget for the costs of one scorer on texts that can be shorter
COSTS_BLOCKS = 16  # blocks of these texts, at least, since the latest 128 tokens of each query are always visible


class Finding:
    """One run of the search: its texts, its stored steps, its time, and what it found so far."""

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
        assert options.block_size is not None, "`tune` sets the device's default"
        self.model, self.tokenizer, self.text, self.options = model, tokenizer, text, options
        self.block_size, self.scorers = options.block_size, scorers_named(options.scorers)
        self.progress, self.time = progress or SilentProgress(), time or TimeBudget(options.time_budget)
        self.texts: SearchTexts = search_texts(tokenizer, text, kinds, options.tokens, options.stretches)
        self.budgets = budgets_for(options.tokens)
        self.cost_tokens = options.cost_tokens or options.tokens
        settings = dict(tokens=options.tokens, block_size=self.block_size, seed=options.seed)
        key = fingerprint(model, self.texts.key(), **settings)
        self.steps = Steps(options.out / "tuning_state.jsonl", key, options.resume)
        self.hold = None
        if options.hold:
            given = (options.hold, options.tokens, options.seed, self.steps.remember, self.time.allows)
            self.hold = HeldTasks(model, tokenizer, text, *given)
        limits = (options.tokens, self.block_size, options.tolerance)
        self.trials = Trials(model, self.texts, self.steps, *limits, self.hold, self.time)
        layers = full_attention_layers(model)
        self.costs = TextCosts(model, layers, self.steps, self.time, self.progress, self.block_size, options.seed)
        self.scorer = self.scorers[0]
        self.tuned: Guide | None = None
        self.uniform: Guide | None = None
        self.held_out: tuple[HeldOutKind, ...] = ()
        self.cut = False  # whether anything was left out for lack of time

    def _search(self, task: Task) -> None:
        """Search the scorer and the budgets of the heads, until the search is done or time is up."""
        task.advance(0, "dense perplexity")
        self._shorten_costs()
        rises = Rises(self.options.tolerance, ERRORS, self.trials.tokens)
        missing = self.costs.missing(self._name(0), self.scorers[0], self.budgets)
        needed = self.trials.seconds() + self.trials.pass_seconds + (self._costs_seconds(1, 1) if missing else 0.0)
        # Nothing is validated if no trial fits, so what the next run needs may take that time.
        with nullcontext() if self.time.allows(needed, urgent=True) else self.time.unreserved():
            if not self._has_time(self.trials.seconds()):
                return
            self.trials.dense(0)  # refuses a model whose activations are not finite, before long work
            costs = self._costs_by_kind(rises, task)
        if costs is None:
            return
        of_tasks = self._task_costs() if self.hold is not None else None
        candidates = TunedCandidates(costs, self.scorer, of_tasks)
        self.trials.closeness.update(candidates.at(SCORER_DENSITY).predicted)
        self.tuned = Guide(candidates, rises, FINE_ENOUGH, first=FIRST)
        self._run("tuned", self.tuned, SEARCH_STEPS, task)
        if self.time.seconds is None or (self.tuned.done and not self.tuned.hopeless):
            self.uniform = Guide(UniformCandidates(costs, self.scorer, candidates.least), rises.again(), UNIFORM_FINE)
            limited = self.time.seconds is not None and self.tuned.best is not None
            below = self.tuned.best.candidate.aim if limited and self.tuned.best else None
            self._run("uniform", self.uniform, UNIFORM_STEPS, task, only_below=below)
        if self.options.held_out:
            self.held_out = self._leave_one_out(costs, of_tasks, rises, task)

    def _shorten_costs(self) -> None:
        """Halve the texts for costs until one scorer's fit well into the budget, unless some length was measured."""
        lengths, fewest = [self.cost_tokens], COSTS_BLOCKS * as_block_size(self.block_size)[1]
        while self.time.seconds is not None and lengths[-1] >= 2 * fewest:
            lengths.append(lengths[-1] // 2)
        expected = {}
        for self.cost_tokens in lengths:
            missing = self.costs.missing(self._name(0), self.scorers[0], self.budgets)
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
        tried = [each for each in scorers if self.steps.names(_tried("tuned", each))]
        missing = [each for each in scorers if self.costs.missing(self._name(0), each, self.budgets)]
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
        """Return the expected seconds of measuring some layers, all by default, on one of the texts."""
        seconds = self.time.expects(PASS, self.cost_tokens)
        return self.costs.seconds(self.cost_tokens, seconds, scorers, layers or len(self.costs.layers))

    def _measure(self, index: int, scorers: Sequence[Scorer]) -> bool:
        """Measure the costs on one text as far as time allows; return whether those of any layer are known."""
        name, ids = self._name(index), self.texts.costs[index].ids[:, : self.cost_tokens + 1]
        missing = [each for each in scorers if self.costs.missing(name, each, self.budgets)]
        if missing and self._has_time(self._costs_seconds(len(missing), 1)):
            rule = partial(self.trials.rule, tokens=self.cost_tokens)
            self.cut |= not self.costs.measure(name, ids, missing, self.budgets, rule)
        return self.costs.of(name, scorers, self.budgets) is not None

    def _costs(self, name: str, scorers: Sequence[Scorer]) -> Costs | None:
        """Return the stored losses on a text, with the densities of the budgets on texts of the trials' length."""
        losses = self.costs.of(name, scorers, self.budgets)
        if losses is None:
            return None
        densities = {}
        for scorer in scorers:
            rules = [self.trials.rule(budget, scorer) for budget in self.budgets]
            shares = [density_of(rule, self.options.tokens, self.block_size) for rule in rules]
            column = torch.tensor(shares, dtype=torch.float64, device="cpu")[:, None]
            densities[scorer] = column.expand_as(losses[scorer])
        return Costs(self.costs.layers, densities, losses, self.budgets)

    def _task_costs(self) -> Costs | None:
        """Return the mean costs on prompts of the tasks that must hold, by the predictions of the answers.

        If time runs out, the mean is over the prompts until then. None if there are none.
        """
        if self.hold is None:
            return None
        found = list[Costs]()
        for number, task in itertools.product(range(COST_SAMPLES), self.hold.tasks):
            name = f" on {task} {number}"
            if self.costs.missing(name, self.scorer, self.budgets):
                if not self._has_time(self._costs_seconds(1)):
                    break
                sample = self.hold.for_costs(task, number)
                ids = torch.cat([sample.prompt, sample.answer[None]], dim=1)
                self.costs.measure(name, ids, [self.scorer], self.budgets, self.trials.rule, last=len(sample.answer))
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
            changes[scorer] = torch.tensor(losses, dtype=torch.float64, device="cpu") - dense
            said = f"perplexity {changes[scorer].mean():+.2%} at {found[scorer].density:.0%} of the blocks"
            task.advance(0, f"{scorer!r}: {said}")
        measured = min(scorers, key=lambda scorer: float(changes[scorer].mean()))
        gained, error = mean_and_error([changes[best] - changes[measured]])
        if gained > ERRORS * error:
            best = measured
        mean, error = mean_and_error([changes[best]])
        rises.learn({kind: found[best].loss}, [KindTrial(kind, math.exp(mean), error, True, changes[best].numel())])
        return best

    def _run(
        self,
        name: str,
        guide: Guide,
        steps: int,
        task: Task,
        only_below: float | None = None,
        kinds: Sequence[str] | None = None,
        start: float | None = None,
    ) -> None:
        """Learn from the stored trials, then try candidates while time allows, and show each.

        With `only_below`, densities from that one on do not matter. The search then starts just below it, and ends if
        that fails.
        """
        prefix = _tried(name, self.scorer)
        layers = sum(
            self.costs.measured(self._name(i), self.scorer, self.budgets) for i in range(len(self.texts.costs))
        )
        for record in map(self.steps.get, self.steps.names(prefix)):
            candidate = guide.candidates.of(record["budgets"])
            trial = self._evaluated(candidate, kinds, guide, stored=True)
            if trial is not None:
                guide.learn(candidate, trial, bounds=record["layers"] == layers)

        def evaluate(candidate: Candidate) -> Trial | None:
            settled = bool(guide.tried) and guide.unsettled is None
            if only_below is not None and settled and guide.bounds()[1] > only_below:
                return None
            key = self.trials.key(candidate.budgets, self.scorer)
            if not self._has_time(self.trials.seconds(key), urgent=guide is self.tuned and not guide.tried):
                return None
            best = f"; so far {_said(guide.best.trial)}" if guide.best else ""
            task.advance(0, f"trying {candidate.aim:.1%} of the blocks, {name}{best}")
            self.steps.store(prefix + key, {"budgets": candidate.budgets, "layers": layers})
            trial = self._evaluated(candidate, kinds, guide)
            guide.rises.share = 1.0 if guide.best else self._text_share()
            if trial is not None:
                task.advance(int(kinds is None), f"{name}: {_said(trial)}")
            return trial

        guide.rises.share = self._text_share() if len(guide.tried) < 2 else 1.0
        if only_below is not None:
            start = only_below / math.sqrt(guide.fine)
        guide.run(evaluate, steps, start)
        self.cut |= guide.unsettled is not None

    def _text_share(self) -> float:
        """Return the share of the text that each of the first trials can use in the time left."""
        seconds = 2 * TRIALS * len(self.texts.search) * self.trials.pass_seconds
        return 1.0 if seconds <= self.time.left else max(0.0, self.time.left) / seconds

    def _evaluated(
        self, candidate: Candidate, kinds: Sequence[str] | None, guide: Guide | None = None, stored: bool = False
    ) -> Trial | None:
        """Evaluate a candidate; the densest one of the tuned budgets fails only clearly, since that ends the search."""
        given = (candidate.aim, candidate.budgets, self.costs.layers, self.scorer)
        futile = ERRORS if guide is not None and guide is self.tuned and guide.is_densest(candidate.aim) else FUTILE
        return self.trials.evaluate(*given, kinds=kinds, stored=stored, futile=futile)

    def _leave_one_out(
        self, costs: Mapping[str, Costs], of_tasks: Costs | None, rises: Rises, task: Task
    ) -> tuple[HeldOutKind, ...]:
        """Tune on all kinds except one and measure that one, for each kind; return the worst first.

        The budgets without a kind are at least as dense as the tuned ones, so a kind that fails shows what a policy of
        that density may lose on text that it never saw.
        """
        found = []
        least = self.tuned.best.candidate.aim if self.tuned is not None and self.tuned.best is not None else 0.0
        for kind in self.texts.kinds:
            task.advance(0, f"without {label(kind)}")
            others = {each: of_kind for each, of_kind in costs.items() if each != kind}
            candidates = TunedCandidates(others, self.scorer, of_tasks)
            guide = Guide(candidates, rises.without(kind), FINE_ENOUGH, least)
            seen = [each for each in self.texts.kinds if each != kind]
            self._run(f"without {label(kind)}", guide, SEARCH_STEPS, task, kinds=seen, start=guide.least)
            found.append(self._without(kind, guide.best, task))
        return tuple(sorted(found, key=lambda each: -(each.ratio or 0.0)))

    def _without(self, kind: str, best: Tried | None, task: Task) -> HeldOutKind:
        """Measure a kind under budgets that were tuned on all others."""
        trial = None
        if best is not None and self._has_time(2 * self.trials.pass_seconds):
            trial = self._evaluated(best.candidate, [kind])
        if trial is None:
            return HeldOutKind(kind, None)
        task.advance(0, f"{label(kind)}, tuned without it: perplexity {trial.ratio - 1:+.2%}")
        return HeldOutKind(kind, trial.density, trial.ratio, trial.error, trial.passed)


def _tried(name: str, scorer: Scorer) -> str:
    """Return the start of the names of the stored trials of a search."""
    return f"tried {name} by {scorer!r} "


def _said(trial: Trial) -> str:
    """Return the density and the rise of perplexity of a trial, and the rise of the kind closest to failing."""
    said = f"{trial.density:.1%} of the blocks, perplexity {trial.ratio - 1:+.2%}"
    if trial.kinds:
        worst = max(trial.kinds, key=lambda row: math.log(row.ratio) + ERRORS * row.error)
        said += f", {label(worst.kind)} {worst.ratio - 1:+.2%}"
    return said + (" passes" if trial.passed else " fails" if trial.decided else " is undecided")
