# SPDX-License-Identifier: Apache-2.0
"""Search a policy: the scorer, the density and the length from which it is sparse, with evidence."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.fast_linears import fast_linears
from dynaxx.lab.kinds import label
from dynaxx.lab.models import LoadedModel, longest_prompt
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tasks.suite import TaskSample
from dynaxx.lab.texts import split_text
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import Budgets, Costs, budgets_for, scorers_named
from dynaxx.lab.tune.crossover import LengthTiming, dense_below, time_lengths
from dynaxx.lab.tune.decode import DecodeResult, tune_decode
from dynaxx.lab.tune.density.candidates import Candidate, SharedCandidates, TunedCandidates, UniformCandidates
from dynaxx.lab.tune.density.guide import Guide, Tried
from dynaxx.lab.tune.density.held_tasks import COST_SAMPLES, HeldTasks
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.density.search_texts import SEARCH_TEXTS, SearchTexts, search_texts
from dynaxx.lab.tune.density.trials import ERRORS, Trials, mean_and_error
from dynaxx.lab.tune.evidence import with_decode_rules, with_evidence
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.reference import with_reference
from dynaxx.lab.tune.result import HeldOutKind, KindTrial, Trial, TuneResult
from dynaxx.lab.tune.sensitivity import HeadCosts, measure_head_costs
from dynaxx.lab.tune.sharing import (
    REACH,
    WORTH,
    SharedCosts,
    SharedLists,
    likeness,
    matched,
    shared_costs,
    shared_lists,
)
from dynaxx.lab.tune.time_budget import COSTS_UNTIL, TASK_COSTS_UNTIL, TUNED_UNTIL, UNIFORM_UNTIL, TimeBudget
from dynaxx.layout import as_block_size
from dynaxx.policy import rules_digest
from dynaxx.selection import Hybrid, Scorer

__all__ = ["Search"]

if TYPE_CHECKING:
    from dynaxx.policy import Policy

logger = logging.getLogger("dynaxx")

SEARCH_STEPS = 8  # trials of budgets per head, at most
UNIFORM_STEPS = 6  # trials of one budget for all heads, at most
SCORER_DENSITY = 0.25  # density at which the best scorer is determined
FINE_ENOUGH = 1.02  # ratio of the passing to the failing density at which a search ends
UNIFORM_FINE = 1.15  # the same for one budget for all heads, which only shows what budgets per head gain
OUT_OF_TIME = (
    "time for the loss of each head ended after %d of %d layers%s; the other layers get the mean of these, so the "
    "policy is less sparse than it could be. Raise --time-budget, or lower --tokens"
)

TASKS_OUT_OF_TIME = (
    "time for the loss of each head on tasks ended after %d of %d prompts; budgets may suit texts better than tasks. "
    "Raise --time-budget, or name fewer tasks in --hold"
)


class Found(NamedTuple):
    """The result of a search, before its policy is timed."""

    scorer: Scorer
    layers: tuple[int, ...]
    budgets: Budgets
    chosen: Trial | None
    tuned: tuple[Trial, ...]
    uniform: tuple[Trial, ...]
    best_uniform: Trial | None
    lists: SharedLists | None
    shared: tuple[Trial, ...]
    held_out: tuple[HeldOutKind, ...]


@contextmanager
def on_device(model: Any, device: str | None) -> Iterator[None]:
    """Keep the model on another device within the block; None leaves it where it is."""
    own = model.device
    if device is not None:
        model.to(device)
    try:
        yield
    finally:
        if device is not None:
            model.to(own)


class Search:
    """One run of the search: its texts, its stored steps, its clock."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        kinds: Mapping[str, str],
        options: TuneOptions,
        progress: Progress | None = None,
    ) -> None:
        assert options.block_size is not None, "`tune` sets the device's default"
        self.model, self.tokenizer, self.text, self.options = model, tokenizer, text, options
        self.block_size, self.scorers = options.block_size, scorers_named(options.scorers)
        self.progress, self.time = progress or SilentProgress(), TimeBudget(options.time_budget)
        self.texts: SearchTexts = search_texts(tokenizer, text, kinds, options.tokens, options.stretches)
        settings = dict(tokens=options.tokens, block_size=self.block_size, seed=options.seed, scorers=self.scorers)
        key = fingerprint(model, self.texts.key(), **settings)
        self._partial: dict[str, dict[str, Any]] = {}  # costs of texts for which time ran out
        self.steps = Steps(options.out / "tuning_state.jsonl", key, options.resume)
        self.hold = None
        if options.hold:
            given = (options.hold, options.tokens, options.seed, self.steps.remember, lambda: self.time.allows(1.0))
            self.hold = HeldTasks(model, tokenizer, text, *given)
        has_time = lambda seconds: self.time.allows(1.0, seconds)
        limits = (options.tokens, self.block_size, options.tolerance)
        self.trials = Trials(model, self.texts, self.steps, *limits, self.hold, has_time)

    def run(self) -> TuneResult:
        """Search, measure and write the policy with its evidence."""
        options = self.options
        steps = 4 + len(self.scorers) + SEARCH_STEPS + UNIFORM_STEPS + 2 + 2
        with evaluating(self.model), self.progress.task("tuning", total=steps) as task:
            with on_device(self.model, options.search_on), fast_linears(self.model):
                found = self._found(task)
            with fast_linears(self.model):
                result = self._with_evidence(self._timed(found, task))
                if options.decode:
                    result = self._with_decode(result, task)
                task.advance(1, "reference for drift")
                if options.reference:
                    loaded = LoadedModel(self.model, self.tokenizer)
                    given = (options.command, options.seed, self.steps, self.time, self.progress)
                    result = with_reference(result, loaded, split_text(self.text).calibration, *given)
            task.advance(1, "done")
            return result.write(options.out)

    def _found(self, task: Task) -> Found:
        """Search the scorer, the budgets of the heads, and which layers choose."""
        task.advance(0, "dense perplexity")
        self.trials.dense(0)  # refuses a model whose activations are not finite, before long work
        task.advance(1, "which scorer")
        rises = Rises(self.options.tolerance, ERRORS, self.trials.tokens)
        scorer = self._best_scorer(rises, task)
        costs = self._costs_by_kind(scorer)
        layers = next(iter(costs.values())).layers
        choosing = self.options.choosing
        if 0 < choosing * (1 + REACH) < len(layers):
            fewest = -(-len(layers) // (1 + REACH))
            raise ValueError(f"`choosing` must be at least {fewest} of the {len(layers)} layers, got {choosing}")
        task.advance(3, repr(scorer))
        of_tasks = self._task_costs(scorer)
        candidates = TunedCandidates(costs, scorer, of_tasks)
        self.trials.closeness.update(candidates.at(SCORER_DENSITY).predicted)

        def evaluate(candidate: Candidate) -> Trial:
            return self.trials.evaluate(candidate.aim, candidate.budgets, layers, scorer)

        tuned = Guide(candidates, rises, FINE_ENOUGH)
        self._run("tuned", tuned, evaluate, SEARCH_STEPS, task, TUNED_UNTIL, at_least_one=True)
        uniform = Guide(UniformCandidates(costs, scorer, candidates.least), rises.again(), UNIFORM_FINE)
        below = tuned.best.candidate.aim if tuned.best is not None and self.time.seconds is not None else None
        self._run("uniform", uniform, evaluate, UNIFORM_STEPS, task, UNIFORM_UNTIL, only_below=below)
        chosen = sparser(tuned.best, uniform.best)
        lists, shared = self._shared(chosen, scorer, rises, task)
        if shared is not None and shared.best is not None and _is_worth_it(shared.best, chosen):
            chosen = shared.best
        else:
            lists = None
        return Found(
            scorer=scorer,
            layers=tuple(layers),
            budgets=chosen.candidate.budgets if chosen else [[1.0] * next(iter(costs.values())).heads for _ in layers],
            chosen=chosen.trial if chosen else None,
            tuned=tuple(tuned.trials),
            uniform=tuple(uniform.trials),
            best_uniform=uniform.best.trial if uniform.best else None,
            lists=lists,
            shared=tuple(shared.trials) if shared else (),
            held_out=self._leave_one_out(costs, of_tasks, scorer, rises, tuned.best, task)
            if self.options.held_out
            else (),
        )

    def _timed(self, found: Found, task: Task) -> TuneResult:
        """Return the result, with the length from which the policy is faster than dense attention."""
        lists = found.lists
        policy = self.trials.policy(found.layers, found.budgets, found.scorer, lists.shared() if lists else ())
        task.advance(0, "crossover against dense")
        key = f"crossover {rules_digest(policy)}"
        timings = self.steps.remember(key, lambda: [asdict(timing) for timing in self._timings(policy)])
        crossover = tuple(LengthTiming(**timing) for timing in timings)
        result = TuneResult(
            model=self.options.name,
            tokens=self.options.tokens,
            tolerance=self.options.tolerance,
            scorer=repr(found.scorer),
            dense_perplexity=self.trials.dense_perplexity(),
            uniform=found.uniform,
            tuned=found.tuned,
            chosen=found.chosen,
            best_uniform_density=found.best_uniform.density if found.best_uniform else None,
            crossover=crossover,
            dense_below=dense_below(crossover) if found.chosen else None,
            budgets=tuple(tuple(row) for row in found.budgets),
            layers=found.layers,
            seconds=self.steps.seconds + self.time.spent,
            command=self.options.command,
            policy=policy,
            held_out=found.held_out,
            shared=found.shared,
            choosing=lists.choosing if lists else (),
        )
        task.advance(2, "evidence")
        return result

    def _run(
        self,
        name: str,
        guide: Guide,
        evaluate: Callable[[Candidate], Trial],
        steps: int,
        task: Task,
        until: float = 1.0,
        only_below: float | None = None,
        at_least_one: bool = False,
        start: float | None = None,
    ) -> None:
        """Run a search until a share of the time budget is used, and show each trial.

        With `only_below`, densities from that one on do not matter. The search then starts just below it, and ends if
        that fails.
        """

        def has_time(guide: Guide) -> bool:
            if only_below is not None and guide.tried and guide.bounds()[1] > only_below:
                return False
            return self.time.allows(until, self.trials.evaluation_seconds) or (at_least_one and not guide.tried)

        def shown(candidate: Candidate) -> Trial:
            trial = evaluate(candidate)
            task.advance(int(name in ("tuned", "uniform")), f"{name} density {trial.density:.1%}: {_rises(trial)}")
            return trial

        if only_below is not None:
            start = only_below / math.sqrt(guide.fine)
        guide.run(shown, steps, has_time, start)
        if name in ("tuned", "uniform"):
            task.advance(steps - len(guide.tried))

    def _shared(
        self, chosen: Tried | None, scorer: Scorer, rises: Rises, task: Task
    ) -> tuple[SharedLists | None, Guide | None]:
        """Let all but `choosing` layers read the blocks of earlier layers; return the lists and the search."""
        if not self.options.choosing or chosen is None or not self.time.allows(1.0):
            return None, None
        task.advance(0, "layers that read the blocks of others")
        lists = shared_lists(self._shared_costs(scorer), self.options.choosing, chosen.candidate.aim)

        def evaluate(candidate: Candidate) -> Trial:
            shared = lists.shared()
            return self.trials.evaluate(candidate.aim, candidate.budgets, lists.costs.layers, scorer, shared=shared)

        guide = Guide(SharedCandidates(lists, self.texts.kinds), rises.again(), FINE_ENOUGH)
        self._run("shared", guide, evaluate, SEARCH_STEPS, task)
        return lists, guide

    def _shared_costs(self, scorer: Scorer) -> SharedCosts:
        """Return the costs of reading other layers' blocks, the mean over the texts for costs."""
        texts = [stretch.ids for stretch in self.texts.costs]
        rule = lambda budget: self.trials.rule(budget, scorer)
        alike = [likeness(self.model, ids, scorer, rule(0.0), self.block_size) for ids in texts]
        matches = matched(torch.stack(alike).mean(0), min(REACH, alike[0].shape[0] - 1))
        found = []
        with self.progress.task("Measuring the loss of shared blocks", total=len(texts) * matches.shape[1]) as inner:
            for ids in texts:
                found.append(
                    shared_costs(
                        self.model,
                        ids,
                        rule,
                        matches,
                        block_size=self.block_size,
                        seed=self.options.seed,
                        done=lambda layer: inner.advance(1, f"layer {layer}"),
                    )
                )
        return SharedCosts.mean(found)

    def _leave_one_out(
        self,
        costs: Mapping[str, Costs],
        of_tasks: Costs | None,
        scorer: Scorer,
        rises: Rises,
        best: Tried | None,
        task: Task,
    ) -> tuple[HeldOutKind, ...]:
        """Tune on all kinds except one and measure that one, for each kind; return the worst first.

        The budgets without a kind are at least as dense as the tuned ones, so a kind that fails shows what a policy of
        that density may lose on text that it never saw.
        """
        found = []
        for kind in self.texts.kinds:
            task.advance(0, f"without {label(kind)}")
            others = {each: of_kind for each, of_kind in costs.items() if each != kind}
            least = best.candidate.aim if best else 0.0
            guide = Guide(TunedCandidates(others, scorer, of_tasks), rises.without(kind), FINE_ENOUGH, least)
            found.append(self._without(kind, guide, scorer, next(iter(others.values())).layers, task))
        return tuple(sorted(found, key=lambda each: -(each.ratio or 0.0)))

    def _without(self, kind: str, guide: Guide, scorer: Scorer, layers: Sequence[int], task: Task) -> HeldOutKind:
        """Tune on all other kinds and measure this one."""
        seen = [each for each in self.texts.kinds if each != kind]

        def evaluate(candidate: Candidate) -> Trial:
            return self.trials.evaluate(candidate.aim, candidate.budgets, layers, scorer, kinds=seen)

        self._run(f"without {label(kind)}", guide, evaluate, SEARCH_STEPS, task, start=guide.least)
        if guide.best is None or not self.time.allows(1.0, self.trials.evaluation_seconds):
            return HeldOutKind(kind, None)
        candidate = guide.best.candidate
        trial = self.trials.evaluate(candidate.aim, candidate.budgets, layers, scorer, kinds=[kind])
        task.advance(0, f"{label(kind)}, tuned without it: perplexity {trial.ratio - 1:+.2%}")
        return HeldOutKind(kind, trial.density, trial.ratio, trial.error, trial.passed)

    def _costs_by_kind(self, scorer: Scorer) -> dict[str, Costs]:
        """Return the costs of a scorer on each kind of text, the means over its stretches."""
        by_kind: dict[str, list[Costs]] = {}
        for index, stretch in enumerate(self.texts.costs):
            by_kind.setdefault(stretch.kind, []).append(self._head_costs(index, (scorer,)))
        return {kind: Costs.mean(each) for kind, each in by_kind.items()}

    def _task_costs(self, scorer: Scorer) -> Costs | None:
        """Return the mean costs of a scorer on prompts of the tasks that must hold, by the predictions of the answers.

        If time runs out, the mean is over the prompts until then. None if there are none.
        """
        if self.hold is None:
            return None
        prompts = list(itertools.product(range(COST_SAMPLES), self.hold.tasks))
        budgets, found = budgets_for(self.options.tokens), list[Costs]()
        rules = [self.trials.rule(budget, scorer) for budget in budgets]
        block_size, seed = self.block_size, self.options.seed

        def measure(sample: TaskSample) -> dict[str, Any]:
            ids = torch.cat([sample.prompt, sample.answer[None]], dim=1)
            last = len(sample.answer)
            return Costs.plain(measure_head_costs(self.model, ids, rules, block_size=block_size, seed=seed, last=last))

        with self.progress.task("Measuring the loss of each head on tasks", total=len(prompts)) as inner:
            for number, task in prompts:
                if not self.time.allows(TASK_COSTS_UNTIL):
                    logger.warning(TASKS_OUT_OF_TIME, len(found), len(prompts))
                    break
                sample = partial(self.hold.for_costs, task, number)
                key = f"costs of {len(budgets)} budgets by {scorer!r} on {task} {number}"
                plain = self.steps.remember(key, lambda sample=sample: measure(sample()))  # type: ignore[misc]
                found.append(Costs.of({scorer: plain}, budgets))
                inner.advance(1, task)
        return Costs.mean(found) if found else None

    def _head_costs(self, index: int, scorers: Sequence[Scorer]) -> Costs:
        """Return the loss of each head on one of the texts for costs."""
        stretch = self.texts.costs[index]
        of = "" if len(self.texts.costs) == 1 else f" on {label(stretch.kind)}"
        until = COSTS_UNTIL * (index + 1) / len(self.texts.costs)
        budgets = budgets_for(self.options.tokens)
        layers = self.model.config.get_text_config().num_hidden_layers

        def measure(candidates: Sequence[Hybrid]) -> list[HeadCosts]:
            with self.progress.task(f"Measuring the loss of each head{of}", total=layers) as inner:
                return measure_head_costs(
                    self.model,
                    stretch.ids,
                    candidates,
                    block_size=self.block_size,
                    seed=self.options.seed,
                    done=lambda layer: inner.advance(1, f"layer {layer}"),
                    go_on=lambda: self.time.allows(until),
                )

        key = lambda scorer: f"costs of {len(budgets)} budgets by {scorer!r} {index}"
        found = {scorer: self._partial[key(scorer)] for scorer in scorers if key(scorer) in self._partial}
        found |= {scorer: self.steps.remember(key(scorer), dict) for scorer in scorers if key(scorer) in self.steps}
        missing = [scorer for scorer in scorers if scorer not in found]
        if missing:
            measured = measure([self.trials.rule(budget, scorer) for scorer in missing for budget in budgets])
            plain = [Costs.plain(measured, place, len(missing)) for place in range(len(missing))]
            found |= dict(zip(missing, plain, strict=True))
            count = sum(each.measured for each in measured)
            if count == len(measured):
                for scorer in missing:
                    self.steps.remember(key(scorer), lambda scorer=scorer: found[scorer])  # type: ignore[misc]
            else:  # for this run alone, so that a later run with more time measures all layers
                self._partial |= {key(scorer): found[scorer] for scorer in missing}
                logger.warning(OUT_OF_TIME, count, len(measured), of)
        if not found[scorers[0]]["layers"]:
            raise ValueError("no layer of this model sees its whole context, so there is nothing to make sparse")
        return Costs.of({scorer: found[scorer] for scorer in scorers}, budgets)

    def _timings(self, policy: Policy) -> list[LengthTiming]:
        """Time attention at increasing lengths, as long as there is time."""
        return time_lengths(self.model, policy, has_time=lambda seconds: self.time.allows(1.0, seconds))

    def _best_scorer(self, rises: Rises, task: Task) -> Scorer:
        """Return the scorer with the smallest predicted loss at one density, or one that measurably loses less.

        The first text for costs predicts and gives the budgets, and the first text for trials measures. A single text
        is noisy, so the measurement decides only by `ERRORS` standard errors. If time has run out, the prediction
        decides. What the best scorer lost is the first estimate of `rises`.
        """
        if len(self.scorers) == 1:
            return self.scorers[0]
        costs, dense, kind = self._head_costs(0, self.scorers), self.trials.dense(0).double(), self.texts.search[0].kind
        predicted: dict[Scorer, float] = {}
        changes: dict[Scorer, Tensor] = {}
        for scorer in self.scorers:
            found = Allocator(costs.density[scorer], costs.loss[scorer]).at(SCORER_DENSITY)
            predicted[scorer] = found.loss
            if self.time.allows(COSTS_UNTIL, (len(self.scorers) - len(changes)) * self.trials.pass_seconds):
                budgets = costs.budgets(found.choice)
                policy = self.trials.policy(costs.layers, budgets, scorer)
                losses = self.trials.remembered(self.trials.key(budgets, scorer), policy, 0)["losses"]
                changes[scorer] = torch.tensor(losses, dtype=torch.float64, device="cpu") - dense
                said = f"perplexity {changes[scorer].mean():+.2%} at {found.density:.0%} of the blocks"
                task.advance(1, f"{scorer!r}: {said}")
        best = min(self.scorers, key=lambda scorer: predicted[scorer])
        if len(changes) < len(self.scorers):
            return best
        measured = min(self.scorers, key=lambda scorer: float(changes[scorer].mean()))
        gained, error = mean_and_error([changes[best] - changes[measured]])
        if gained > ERRORS * error:
            best = measured
        mean, error = mean_and_error([changes[best]])
        rises.learn({kind: predicted[best]}, [KindTrial(kind, math.exp(mean), error, True, changes[best].numel())])
        return best

    def _with_evidence(self, result: TuneResult) -> TuneResult:
        parameter = next(self.model.parameters())
        dtype = str(parameter.dtype).removeprefix("torch.")
        return with_evidence(result, parameter.device.type, dtype, longest_prompt(self.model))

    def _with_decode(self, result: TuneResult, task: Task) -> TuneResult:
        """Return the result with decode rules, if they preserve perplexity and save time."""
        options = self.options
        page_size = options.page_size or as_block_size(self.block_size)[1]
        stretches = options.stretches if len(self.texts.kinds) > 1 else max(SEARCH_TEXTS, options.stretches)
        if not self.time.allows(1.0):
            said = "no rule: no time was left to search for one"
            none = DecodeResult((), None, (), (), options.cuda_graph, None, said)
            return dataclasses.replace(result, decode=none)
        found = tune_decode(
            self.model,
            [stretch.ids for stretch in self.texts.first(stretches)],
            [stretch.ids for stretch in self.texts.costs],
            result.layers,
            tolerance=options.tolerance,
            page_size=page_size,
            cuda_graph=options.cuda_graph,
            remember=self.steps.remember,
            say=lambda line: task.advance(0, line),
            has_time=lambda: self.time.allows(1.0),
        )
        return with_decode_rules(result, found, page_size, options.command)


def sparser(tuned: Tried | None, uniform: Tried | None) -> Tried | None:
    """Return the sparser of two passing results, the tuned one if they are equal."""
    if uniform is None or (tuned is not None and tuned.trial.density <= uniform.trial.density):
        return tuned
    return uniform


def _is_worth_it(shared: Tried, chosen: Tried | None) -> bool:
    """Return whether layers that share blocks visit hardly more of them."""
    return chosen is not None and shared.trial.density <= WORTH * chosen.trial.density


def _rises(trial: Trial) -> str:
    """Return the rise of perplexity of a trial, and that of the kind closest to failing, in words."""
    said = f"perplexity {trial.ratio - 1:+.2%}"
    if not trial.kinds:
        return said
    worst = max(trial.kinds, key=lambda row: math.log(row.ratio) + ERRORS * row.error)
    return f"{said}, {label(worst.kind)} {worst.ratio - 1:+.2%}" + ("" if trial.passed else ", too much")
