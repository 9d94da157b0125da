# SPDX-License-Identifier: Apache-2.0
"""Search a policy: the scorer, the density and the length from which it is sparse, with evidence."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.fast_linears import fast_linears
from dynaxx.lab.models import LoadedModel, longest_prompt
from dynaxx.lab.perplexity import perplexity
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.texts import split_text
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import DEFAULT_SCORERS, Budgets, Costs, budgets_for, scorers_named
from dynaxx.lab.tune.crossover import LengthTiming, dense_below, time_lengths
from dynaxx.lab.tune.decode import DecodeResult, tune_decode
from dynaxx.lab.tune.evidence import with_decode_rules, with_evidence
from dynaxx.lab.tune.guide import Guide
from dynaxx.lab.tune.held_tasks import HeldTasks
from dynaxx.lab.tune.reference import with_reference
from dynaxx.lab.tune.result import HeldOutKind, Trial, TuneResult, sparser
from dynaxx.lab.tune.search_texts import SearchTexts, search_texts
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
from dynaxx.lab.tune.time_budget import COSTS_UNTIL, TUNED_UNTIL, UNIFORM_UNTIL, TimeBudget
from dynaxx.lab.tune.trials import ERRORS, Trials
from dynaxx.layout import as_block_size
from dynaxx.policy import rules_digest
from dynaxx.selection import Scorer

__all__ = ["Search"]

if TYPE_CHECKING:
    from dynaxx.policy import Policy

logger = logging.getLogger("dynaxx")

SEARCH_STEPS = 5  # real evaluations per search, at most
SCORER_DENSITY = 0.25  # density at which the best scorer is determined
FINE_ENOUGH = 1.1  # ratio of the passing to the failing density at which a search ends
OUT_OF_TIME = (
    "time for the loss of each head ended after %d of %d layers%s; the other layers get the mean of these, so the "
    "policy is less sparse than it could be. Raise --time-budget, or lower --tokens"
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
        out: Path,
        tokens: int,
        block_size: int | tuple[int, int],
        seed: int,
        resume: bool,
        progress: Progress | None,
        time_budget: float | None,
        tolerance: float,
        kinds: Mapping[str, str] | None = None,
        hold: Sequence[str] = (),
        choosing: int = 0,
        scorers: Sequence[str] = DEFAULT_SCORERS,
        stretches: int = 1,
        search_on: str | None = None,
        page_size: int | None = None,
    ) -> None:
        self.choosing, self.scorers, self.search_on = choosing, scorers_named(scorers), search_on
        self.tokenizer = tokenizer
        self.model, self.out, self.tokens, self.block_size, self.seed = model, Path(out), tokens, block_size, seed
        self.page_size = page_size or as_block_size(block_size)[1]
        self.tolerance, self.progress = tolerance, progress or SilentProgress()
        self.time = TimeBudget(time_budget)
        self.texts: SearchTexts = search_texts(tokenizer, text, kinds or {}, tokens, stretches)
        settings = dict(tokens=tokens, block_size=block_size, seed=seed, scorers=self.scorers)
        key = fingerprint(model, self.texts.key(), **settings)
        self.steps = Steps(self.out / "tuning_state.json", key, resume)
        held = HeldTasks(model, tokenizer, text, hold, tokens, seed, self.steps.remember) if hold else None
        self.trials = Trials(model, self.texts, self.steps, tokens, block_size, tolerance, held)

    def run(
        self,
        command: str,
        name: str,
        traffic: str,
        with_decode: bool,
        cuda_graph: bool = False,
        held_out: bool = False,
    ) -> TuneResult:
        """Search, measure and write the policy with its evidence."""
        steps = 4 + len(self.scorers) + 2 * SEARCH_STEPS + 2 + 2
        with evaluating(self.model), self.progress.task("tuning", total=steps) as task:
            with on_device(self.model, self.search_on), fast_linears(self.model):
                found = self._found(task, held_out)
            with fast_linears(self.model):
                result = self._with_evidence(self._timed(found, task, command, name))
                if with_decode:
                    result = self._with_decode(result, command, task, cuda_graph)
                task.advance(1, "reference for drift")
                if traffic:
                    loaded, text = LoadedModel(self.model, self.tokenizer), split_text(traffic).calibration
                    options = (command, self.seed, self.steps, self.time, self.progress)
                    result = with_reference(result, loaded, text, *options)
            task.advance(1, "done")
            return result.write(self.out)

    def _found(self, task: Task, held_out: bool) -> Found:
        """Search the scorer, the budgets of the heads, and which layers choose."""
        task.advance(0, "dense perplexity")
        self.trials.measure_dense()
        task.advance(1, "loss of each head")
        each_costs = self._costs_by_kind()
        costs = Costs.mean(each_costs)
        layers = costs.layers
        if 0 < self.choosing * (1 + REACH) < len(layers):
            fewest = -(-len(layers) // (1 + REACH))
            raise ValueError(f"`choosing` must be at least {fewest} of the {len(layers)} layers, got {self.choosing}")
        task.advance(3, "which scorer")
        scorer, allocator, known = self._best_scorer(costs)
        task.advance(len(self.scorers), repr(scorer))
        tuned = self._tuned(costs, allocator)

        def uniform(target: float) -> tuple[float, Budgets]:
            density, budget = costs.uniform(scorer, target)
            return density, [[budget] * costs.heads] * len(layers)

        least = allocator.least_density

        def evaluate(make: Callable[[float], tuple[float, Budgets]]) -> Callable[[float], Trial]:
            return lambda target: self.trials.evaluate(*make(target), layers, scorer)

        guide = Guide(lambda density: allocator.at(density).loss, self.tolerance, ERRORS)
        tuned_trials, best_tuned = self._search("tuned", evaluate(tuned), least, task, TUNED_UNTIL, guide, known)
        guide = guide.of(lambda density: costs.uniform_loss(scorer, density))
        below = best_tuned.aim if best_tuned is not None and self.time.seconds is not None else None
        uniform_trials, best_uniform = self._search(
            "uniform", evaluate(uniform), least, task, UNIFORM_UNTIL, guide, only_below=below
        )
        chosen, make = sparser((best_tuned, tuned), (best_uniform, uniform))
        lists, shared_trials, best_shared = self._shared(chosen, scorer, guide, task)
        if best_shared is None:
            lists = None
        if lists is not None:
            chosen, make = best_shared, lists.budgets
        budgets = make(chosen.aim)[1] if chosen else [[1.0] * costs.heads for _ in layers]
        return Found(
            scorer=scorer,
            layers=tuple(layers),
            budgets=budgets,
            chosen=chosen,
            tuned=tuple(tuned_trials),
            uniform=tuple(uniform_trials),
            best_uniform=best_uniform,
            lists=lists,
            shared=tuple(shared_trials),
            held_out=self._leave_one_out(each_costs, scorer, task) if held_out else (),
        )

    def _timed(self, found: Found, task: Task, command: str, name: str) -> TuneResult:
        """Return the result, with the length from which the policy is faster than dense attention."""
        lists = found.lists
        policy = self.trials.policy(found.layers, found.budgets, found.scorer, lists.shared() if lists else ())
        task.advance(0, "crossover against dense")
        key = f"crossover {rules_digest(policy)}"
        timings = self.steps.remember(key, lambda: [asdict(timing) for timing in self._timings(policy)])
        crossover = tuple(LengthTiming(**timing) for timing in timings)
        result = TuneResult(
            model=name,
            tokens=self.tokens,
            tolerance=self.tolerance,
            scorer=repr(found.scorer),
            dense_perplexity=perplexity(torch.cat(self.trials.dense)),
            uniform=found.uniform,
            tuned=found.tuned,
            chosen=found.chosen,
            best_uniform_density=found.best_uniform.density if found.best_uniform else None,
            crossover=crossover,
            dense_below=dense_below(crossover) if found.chosen else None,
            budgets=tuple(tuple(row) for row in found.budgets),
            layers=found.layers,
            seconds=self.steps.seconds + self.time.spent,
            command=command,
            policy=policy,
            held_out=found.held_out,
            shared=found.shared,
            choosing=lists.choosing if lists else (),
        )
        task.advance(2, "evidence")
        return result

    def _tuned(self, costs: Costs, allocator: Allocator) -> Callable[[float], tuple[float, Budgets]]:
        def make(target: float) -> tuple[float, Budgets]:
            found = allocator.at(target)
            return found.density, costs.budgets(found.choice)

        return make

    def _shared(
        self, chosen: Trial | None, scorer: Scorer, guide: Guide, task: Task
    ) -> tuple[SharedLists | None, list[Trial], Trial | None]:
        """Let all but `choosing` layers read the blocks of earlier layers.

        Returns:
            The lists, the trials, and the sparsest trial that passed and is worth it.
        """
        if not self.choosing or chosen is None or not self.time.allows(1.0):
            return None, [], None
        task.advance(0, "layers that read the blocks of others")
        lists = shared_lists(self._shared_costs(scorer), self.choosing, chosen.aim)

        def evaluate(target: float) -> Trial:
            density, budgets, _ = lists.at(target)
            return self.trials.evaluate(density, budgets, lists.costs.layers, scorer, shared=lists.shared())

        guide = guide.of(lambda density: lists.at(density)[2])
        trials, best = self._search("shared", evaluate, lists.least_density, None, 1.0, guide)
        worth = best is not None and best.density <= WORTH * chosen.density
        return lists, trials, best if worth else None

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
                        seed=self.seed,
                        done=lambda layer: inner.advance(1, f"layer {layer}"),
                    )
                )
        return SharedCosts.mean(found)

    def _leave_one_out(self, costs: Sequence[Costs], scorer: Scorer, task: Task) -> tuple[HeldOutKind, ...]:
        """Tune on all kinds except one and measure that one, for each kind; return the worst first."""
        found = []
        for index, kind in enumerate(self.texts.kinds):
            task.advance(0, f"without {kind}")
            others = Costs.mean([each for i, each in enumerate(costs) if i != index])
            found.append(self._without(kind, others, scorer))
        return tuple(sorted(found, key=lambda each: -(each.ratio or 0.0)))

    def _without(self, kind: str, costs: Costs, scorer: Scorer) -> HeldOutKind:
        """Tune on all other kinds and measure this one."""
        seen = [each for each in self.texts.kinds if each != kind]
        allocator = Allocator(costs.density[scorer], costs.loss[scorer])
        make = self._tuned(costs, allocator)

        def evaluate(target: float) -> Trial:
            return self.trials.evaluate(*make(target), costs.layers, scorer, kinds=seen)

        guide = Guide(lambda density: allocator.at(density).loss, self.tolerance, ERRORS)
        _, best = self._search(f"without {kind}", evaluate, allocator.least_density, None, 1.0, guide)
        if best is None:
            return HeldOutKind(kind, None)
        trial = self.trials.evaluate(*make(best.aim), costs.layers, scorer, kinds=[kind])
        return HeldOutKind(kind, trial.density, trial.ratio, trial.error, trial.passed)

    def _costs_by_kind(self) -> list[Costs]:
        """Return the costs on each kind of text, the means over its stretches."""
        by_kind: dict[str, list[Costs]] = {}
        for index, stretch in enumerate(self.texts.costs):
            by_kind.setdefault(stretch.kind, []).append(self._head_costs(index))
        return [Costs.mean(each) for each in by_kind.values()]

    def _head_costs(self, index: int) -> Costs:
        """Return the loss of each head on one of the texts for costs."""
        stretch = self.texts.costs[index]
        of = "" if len(self.texts.costs) == 1 else f" on {stretch.kind}"
        until = COSTS_UNTIL * (index + 1) / len(self.texts.costs)
        budgets = budgets_for(self.tokens)

        def measure() -> list[HeadCosts]:
            candidates = [self.trials.rule(budget, scorer) for scorer in self.scorers for budget in budgets]
            with self.progress.task(f"Measuring the loss of each head{of}", total=layers) as inner:
                return measure_head_costs(
                    self.model,
                    stretch.ids,
                    candidates,
                    block_size=self.block_size,
                    seed=self.seed,
                    done=lambda layer: inner.advance(1, f"layer {layer}"),
                    go_on=lambda: self.time.allows(until),
                )

        layers = self.model.config.get_text_config().num_hidden_layers
        key = f"costs of {len(budgets)} budgets by scorer {index}"
        if key in self.steps:
            found = self.steps.remember(key, dict)
        else:
            measured = measure()
            found = Costs.plain(measured)
            count = sum(each.measured for each in measured)
            if count == len(measured):
                self.steps.remember(key, lambda: found)
            else:  # not remembered, so that a later run with more time measures all layers
                logger.warning(OUT_OF_TIME, count, len(measured), of)
        if not found["layers"]:
            raise ValueError("no layer of this model sees its whole context, so there is nothing to make sparse")
        return Costs.of(found, self.scorers, budgets)

    def _timings(self, policy: Policy) -> list[LengthTiming]:
        """Time attention at increasing lengths, as long as there is time."""
        return time_lengths(self.model, policy, has_time=lambda seconds: self.time.allows(1.0, seconds))

    def _best_scorer(self, costs: Costs) -> tuple[Scorer, Allocator, Trial | None]:
        """Return the scorer with the smallest loss at one density in the real model, and its trial.

        The first text decides; the best scorer is then evaluated on the other texts. If time has run out, the predicted
        costs decide and there is no trial, as with a single scorer.
        """
        if len(self.scorers) == 1:
            (scorer,) = self.scorers
            return scorer, Allocator(costs.density[scorer], costs.loss[scorer]), None
        tried: list[tuple[float, Scorer, Allocator, Budgets | None]] = []
        for scorer in self.scorers:
            allocator = Allocator(costs.density[scorer], costs.loss[scorer])
            found = allocator.at(SCORER_DENSITY)
            if not self.time.allows(TUNED_UNTIL, len(self.scorers) * self.trials.evaluation_seconds):
                tried.append((found.loss, scorer, allocator, None))
                continue
            budgets = costs.budgets(found.choice)
            policy = self.trials.policy(costs.layers, budgets, scorer)
            losses = torch.tensor(self.trials.remembered(self.trials.key(budgets, scorer), policy, 0)["losses"])
            tried.append((float((losses - self.trials.dense[0]).double().mean()), scorer, allocator, budgets))
        _, scorer, allocator, chosen = min(tried, key=lambda each: (each[3] is None, each[0]))
        if chosen is None:
            return scorer, allocator, None
        density = allocator.at(SCORER_DENSITY).density
        return scorer, allocator, self.trials.evaluate(density, chosen, costs.layers, scorer)

    def _search(
        self,
        kind: str,
        evaluate: Callable[[float], Trial],
        least: float,
        task: Task | None,
        until: float,
        guide: Guide,
        known: Trial | None = None,
        only_below: float | None = None,
    ) -> tuple[list[Trial], Trial | None]:
        """Evaluate the densities that the guide predicts, until a share of the time budget is used.

        With `only_below`, densities from that one on do not matter. The search then starts just below it, and ends if
        that fails.

        Returns:
            The trials from dense to sparse, and the sparsest that passed.
        """
        trials = [] if known is None else [known]
        guide.learn(trials)
        done = 0
        while done < SEARCH_STEPS:
            passed = min((trial.aim for trial in trials if trial.passed), default=1.0)
            below = [trial.aim for trial in trials if not trial.passed and trial.aim < passed]
            failed = max(below, default=None)
            if trials and passed / max(failed or 0.0, least, 1e-6) < FINE_ENOUGH:
                break
            if only_below is not None and trials and passed > only_below:
                break
            if not self.time.allows(until, self.trials.evaluation_seconds) and (trials or kind != "tuned"):
                break
            if only_below is not None and not trials:
                aim = max(least, only_below / math.sqrt(FINE_ENOUGH))
            else:
                aim = guide.next(least, failed, passed, FINE_ENOUGH)
            trials.append(evaluate(aim))
            guide.learn(trials[-1:])
            done += 1
            if task is not None:
                said = f"{kind} density {trials[-1].density:.0%}: perplexity {trials[-1].ratio - 1:+.2%}"
                task.advance(1, said)
        if task is not None:
            task.advance(SEARCH_STEPS - done)
        best = min((trial for trial in trials if trial.passed), key=lambda trial: trial.aim, default=None)
        return sorted(trials, key=lambda trial: -trial.aim), best

    def _with_evidence(self, result: TuneResult) -> TuneResult:
        parameter = next(self.model.parameters())
        dtype = str(parameter.dtype).removeprefix("torch.")
        return with_evidence(result, parameter.device.type, dtype, longest_prompt(self.model))

    def _with_decode(self, result: TuneResult, command: str, task: Task, cuda_graph: bool) -> TuneResult:
        """Return the result with decode rules, if they preserve perplexity and save time."""
        if not self.time.allows(1.0):
            said = "no rule: no time was left to search for one"
            none = DecodeResult((), None, (), (), cuda_graph, None, said)
            return dataclasses.replace(result, decode=none)
        found = tune_decode(
            self.model,
            [stretch.ids for stretch in self.texts.search],
            [stretch.ids for stretch in self.texts.costs],
            result.layers,
            tolerance=self.tolerance,
            page_size=self.page_size,
            cuda_graph=cuda_graph,
            remember=self.steps.remember,
            say=lambda line: task.advance(0, line),
            has_time=lambda: self.time.allows(1.0),
        )
        return with_decode_rules(result, found, self.page_size, command)
