# SPDX-License-Identifier: Apache-2.0
"""Search a policy: the scorer, the density and the length from which it is sparse, with evidence."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaxx.lab.attention_route import evaluating
from dynaxx.lab.models import LoadedModel, longest_prompt
from dynaxx.lab.perplexity import perplexity, token_losses
from dynaxx.lab.progress import Progress, SilentProgress, Task
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.texts import encode, split_text
from dynaxx.lab.tune.allocation import Allocator
from dynaxx.lab.tune.costs import BUDGETS, SCORERS, Budgets, Costs
from dynaxx.lab.tune.crossover import LengthTiming, dense_below, time_lengths
from dynaxx.lab.tune.decode import DecodeResult, tune_decode
from dynaxx.lab.tune.evidence import with_decode_rules, with_evidence
from dynaxx.lab.tune.reference import with_reference
from dynaxx.lab.tune.result import Trial, TuneResult, sparser
from dynaxx.lab.tune.sensitivity import HeadCosts, measure_head_costs
from dynaxx.lab.tune.time_budget import COSTS_UNTIL, TUNED_UNTIL, UNIFORM_UNTIL, TimeBudget
from dynaxx.patterns import LastQueries, LocalBlocks, Pattern, Sink
from dynaxx.policy import rules_digest
from dynaxx.selection import Hybrid, Scorer, TopK

if TYPE_CHECKING:
    from dynaxx.policy import Policy

LOCAL_TOKENS = 128  # tokens before each q block that are always visible, in whole blocks
LAST_QUERIES = 64  # last queries that see everything, which retrieval needs although perplexity does not
SEARCH_TEXTS = 2
SEARCH_STEPS = 5  # real evaluations per search, the first at 50 %
SCORER_DENSITY = 0.25  # density at which the best scorer is chosen
ERRORS = 2  # standard errors added to the rise of perplexity before the comparison with the tolerance
FINE_ENOUGH = 1.1  # ratio of the passing to the failing density at which a search ends


def calibration_ids(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """Return the token ids to tune on, from the calibration half of a text: (1, ...) int64.

    Raises:
        ValueError: the text is too short; the message gives its length.
    """
    part = split_text(text).calibration
    return encode(tokenizer, part, (1 + SEARCH_TEXTS) * tokens + 1, part="the half of the text to tune on")


class Search:
    """One run of the search: its texts, its stored steps, its clock."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        out: Path,
        tokens: int,
        block_size: int,
        seed: int,
        resume: bool,
        progress: Progress | None,
        time_budget: float | None,
        tolerance: float,
    ) -> None:
        self.tokenizer = tokenizer
        self.model, self.out, self.tokens, self.block_size, self.seed = model, Path(out), tokens, block_size, seed
        self.tolerance, self.progress = tolerance, progress or SilentProgress()
        self.time = TimeBudget(time_budget)
        self.evaluation_seconds = 0.0  # seconds of the slowest evaluation
        ids = calibration_ids(tokenizer, text, tokens)
        self.cost_ids = ids[:, : tokens + 1]
        starts = range(tokens, tokens * (1 + SEARCH_TEXTS), tokens)
        self.search_ids = [ids[:, start : start + tokens + 1] for start in starts]
        key = fingerprint(model, ids, tokens=tokens, block_size=block_size, seed=seed)
        self.steps = Steps(self.out / "tuning_state.json", key, resume)
        local = LocalBlocks(max(2, LOCAL_TOKENS // block_size))
        self.pattern: Pattern = Sink(block_size) | local | LastQueries(LAST_QUERIES)
        self.floor = tokens // block_size // 2

    def run(self, command: str, name: str, traffic: str, with_decode: bool, cuda_graph: bool = False) -> TuneResult:
        steps = 4 + len(SCORERS) + 2 * SEARCH_STEPS + 2 + 2
        with evaluating(self.model), self.progress.task("tuning", total=steps) as task:
            result = self._with_evidence(self._run(task, command, name))
            if with_decode:
                result = self._with_decode(result, command, task, cuda_graph)
            task.advance(1, "reference for drift")
            if traffic:
                loaded, text = LoadedModel(self.model, self.tokenizer), split_text(traffic).calibration
                result = with_reference(result, loaded, text, command, self.seed, self.steps, self.time, self.progress)
            task.advance(1, "done")
            return result.write(self.out)

    def _run(self, task: Task, command: str, name: str) -> TuneResult:
        task.advance(0, "dense perplexity")
        self.dense = torch.tensor(self.steps.remember("dense", lambda: self._losses(None)))
        task.advance(1, "loss of each head")
        costs = self._head_costs()
        layers = costs.layers
        task.advance(3, "which scorer")
        scorer, allocator, known = self._best_scorer(costs)
        task.advance(len(SCORERS), repr(scorer))

        def tuned(target: float) -> tuple[float, Budgets]:
            found = allocator.at(target)
            return found.density, costs.budgets(found.choice)

        def uniform(target: float) -> tuple[float, Budgets]:
            density, budget = costs.uniform(scorer, target)
            return density, [[budget] * costs.heads] * len(layers)

        least = allocator.least_density

        def evaluate(make: Callable[[float], tuple[float, Budgets]]) -> Callable[[float], Trial]:
            return lambda target: self._evaluate(*make(target), layers, scorer)

        tuned_trials, best_tuned = self._bisect("tuned", evaluate(tuned), least, task, TUNED_UNTIL, known)
        uniform_trials, best_uniform = self._bisect("uniform", evaluate(uniform), least, task, UNIFORM_UNTIL)
        chosen, make = sparser((best_tuned, tuned), (best_uniform, uniform))
        budgets = make(chosen.density)[1] if chosen else [[1.0] * costs.heads for _ in layers]
        policy = self._policy(layers, budgets, scorer)
        task.advance(0, "crossover against dense")
        key = f"crossover {rules_digest(policy)}"
        timings = self.steps.remember(key, lambda: [asdict(timing) for timing in self._timings(policy)])
        crossover = tuple(LengthTiming(**timing) for timing in timings)
        border = dense_below(crossover) if chosen else None
        result = TuneResult(
            model=name,
            tokens=self.tokens,
            tolerance=self.tolerance,
            scorer=repr(scorer),
            dense_perplexity=perplexity(self.dense),
            uniform=tuple(uniform_trials),
            tuned=tuple(tuned_trials),
            chosen=chosen,
            best_uniform_density=best_uniform.density if best_uniform else None,
            crossover=crossover,
            dense_below=border,
            budgets=tuple(tuple(row) for row in budgets),
            layers=tuple(layers),
            seconds=self.steps.seconds + self.time.spent,
            command=command,
            policy=policy,
        )
        task.advance(2, "evidence")
        return result

    def _head_costs(self) -> Costs:
        def measure() -> list[HeadCosts]:
            candidates = [self._rule(budget, scorer) for scorer in SCORERS for budget in BUDGETS]
            with self.progress.task("Measuring the loss of each head", total=layers) as inner:
                return measure_head_costs(
                    self.model,
                    self.cost_ids,
                    candidates,
                    block_size=self.block_size,
                    seed=self.seed,
                    done=lambda layer: inner.advance(1, f"layer {layer}"),
                    go_on=lambda: self.time.allows(COSTS_UNTIL),
                )

        layers = self.model.config.get_text_config().num_hidden_layers
        if "head costs" in self.steps:
            found = self.steps.remember("head costs", dict)
        else:
            measured = measure()
            found = Costs.plain(measured)
            if all(each.measured for each in measured):  # otherwise a later run with more time measures the others
                self.steps.remember("head costs", lambda: found)
        if not found["layers"]:
            raise ValueError("no layer of this model sees its whole context, so there is nothing to make sparse")
        return Costs.of(found)

    def _timings(self, policy: Policy) -> list[LengthTiming]:
        """Time attention at increasing lengths, as long as there is time."""
        return time_lengths(self.model, policy, has_time=lambda seconds: self.time.allows(1.0, seconds))

    def _best_scorer(self, costs: Costs) -> tuple[Scorer, Allocator, Trial | None]:
        """Return the scorer whose allocated budgets lose least at one density in the real model, and that trial.

        Without time to try them, the predicted costs decide, and there is no trial.
        """
        tried: list[tuple[float, Scorer, Allocator, Trial | None]] = []
        for scorer in SCORERS:
            allocator = Allocator(costs.density[scorer], costs.loss[scorer])
            found = allocator.at(SCORER_DENSITY)
            if not self.time.allows(TUNED_UNTIL, len(SCORERS) * self.evaluation_seconds):
                tried.append((1.0 + found.loss, scorer, allocator, None))
                continue
            trial = self._evaluate(found.density, costs.budgets(found.choice), costs.layers, scorer)
            tried.append((trial.ratio, scorer, allocator, trial))
        return min(tried, key=lambda each: each[0])[1:]

    def _bisect(
        self,
        kind: str,
        evaluate: Callable[[float], Trial],
        least: float,
        task: Task,
        until: float,
        known: Trial | None = None,
    ) -> tuple[list[Trial], Trial | None]:
        """Evaluate densities from 50 % down (or up, if 50 % fails), until a share of the time budget at most.

        Returns:
            The trials, densest first, and the sparsest that passed.
        """
        trials = [] if known is None else [known]
        target = 0.5
        for step in range(SEARCH_STEPS):
            if not self.time.allows(until, self.evaluation_seconds) and (trials or kind == "uniform"):
                task.advance(SEARCH_STEPS - step)
                break
            trials.append(evaluate(target))
            task.advance(1, f"{kind} density {trials[-1].density:.0%}: perplexity {trials[-1].ratio - 1:+.2%}")
            ceiling = min((trial.density for trial in trials if trial.passed), default=1.0)
            fails = max(
                (trial.density for trial in trials if not trial.passed and trial.density < ceiling), default=least
            )
            if ceiling / max(fails, 1e-6) < FINE_ENOUGH:
                task.advance(SEARCH_STEPS - 1 - step)
                break
            target = (ceiling * fails) ** 0.5
        passed = [trial for trial in trials if trial.passed]
        best = min(passed, key=lambda trial: trial.density, default=None)
        return sorted(trials, key=lambda trial: -trial.density), best

    def _rule(self, budget: float | tuple[float, ...], scorer: Scorer) -> Hybrid:
        return Hybrid(self.pattern, TopK(budget, scorer, self.floor, per="head"))  # budgets are per head

    def _evaluate(self, density: float, budgets: Budgets, layers: Sequence[int], scorer: Scorer) -> Trial:
        policy = self._policy(layers, budgets, scorer)
        key = "budgets " + fingerprint(None, torch.tensor(budgets), rule=repr(self._rule(0.0, scorer)))
        losses = torch.tensor(self.steps.remember(key, lambda: self._losses(policy)))
        change = (losses - self.dense).double()
        mean, error = float(change.mean()), float(change.std() / change.numel() ** 0.5)
        ratio = float(torch.tensor(mean).exp())
        passed = float(torch.tensor(mean + ERRORS * error).exp()) <= 1 + self.tolerance
        return Trial(density, perplexity(losses), ratio, error, passed)

    def _losses(self, policy: Policy | None) -> list[float]:
        """Return the loss of every token of the search texts, dense or under a policy."""
        from dynaxx.integrations.transformers.apply_policy import apply

        started = time.monotonic()
        handle = apply(self.model, policy) if policy is not None else None
        try:
            found = [token_losses(self.model, ids)[0] for ids in self.search_ids]
        finally:
            if handle is not None:
                handle.remove()
        self.evaluation_seconds = max(self.evaluation_seconds, time.monotonic() - started)
        return [round(value, 6) for value in torch.cat(found).tolist()]

    def _policy(self, layers: Sequence[int], budgets: Budgets, scorer: Scorer) -> Policy:
        from dynaxx.integrations.transformers.apply_policy import model_facts
        from dynaxx.policy import Policy, Rule, Tolerances

        by_budgets: dict[tuple[float, ...], list[int]] = {}
        for layer, row in zip(layers, budgets, strict=True):
            by_budgets.setdefault(tuple(row), []).append(layer)
        rules = [
            Rule.of(self._rule(row[0] if len(set(row)) == 1 else row, scorer), layers=same)
            for row, same in by_budgets.items()
        ]
        return Policy(
            model=model_facts(self.model),
            block_size=self.block_size,
            rules=tuple(rules),
            tolerances=Tolerances(perplexity_ratio=1 + self.tolerance),
        )

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
            self.search_ids,
            result.layers,
            tolerance=self.tolerance,
            page_size=self.block_size,
            cuda_graph=cuda_graph,
            remember=self.steps.remember,
            say=lambda line: task.advance(0, line),
            has_time=lambda: self.time.allows(1.0),
        )
        return with_decode_rules(result, found, self.block_size, command)
