# SPDX-License-Identifier: Apache-2.0
"""One run of `tune`: search, time the policy on this machine, and say what was found.

A search ends when it is done, when its time is up, or when it is interrupted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from dynaxx.lab.about import about
from dynaxx.lab.machine import machine_facts
from dynaxx.lab.models import LoadedModel, longest_prompt
from dynaxx.lab.perplexity import evaluating, fast_linears, measure_pace
from dynaxx.lab.progress import Task
from dynaxx.lab.texts import split_text
from dynaxx.lab.time_budget import PASS
from dynaxx.lab.tune.crossover import LengthTiming, dense_below, is_faster, lengths_of, time_lengths
from dynaxx.lab.tune.decode import DecodeResult, tune_decode
from dynaxx.lab.tune.density.guide import Guide, Tried
from dynaxx.lab.tune.density.search_texts import SEARCH_TEXTS
from dynaxx.lab.tune.evidence import with_decode_rules, with_evidence
from dynaxx.lab.tune.finding import SEARCH_STEPS, UNIFORM_STEPS, Finding
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.outcome import Outcome, Timed, decide
from dynaxx.lab.tune.result import Ended, TuneResult
from dynaxx.lab.tune.retune import MIN_REQUESTS, record
from dynaxx.layout import as_block_size
from dynaxx.policy import Guard, Policy, Profile, rules_digest

SHARE = 0.25  # largest time of recording a reference, as a share of the time spent so far
EXPECTED_PASSES = 16  # passes over a text until a search is done, about


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


class Search(Finding):
    """One run of the search, and its result."""

    def run(self) -> TuneResult:
        """Search, measure and write the policy with its evidence."""
        options = self.options
        with evaluating(self.model), self.progress.task("Searching", total=SEARCH_STEPS + UNIFORM_STEPS) as task:
            try:
                with on_device(self.model, options.search_on), self._fast():
                    measure_pace(self.model, self.tokenizer, self.text, self.time)
                    self.time.recall(self.steps.get("pace") or ())
                    with self.time.reserving(lambda: self.timing_seconds):
                        self._search(task)
                with self._fast():
                    result = self._finished(self._result(task), task)
            except KeyboardInterrupt:
                result = self._result(None, "interrupted")
            task.advance(0, "done")
            if self.time.seconds is not None:
                self.steps.store("pace", [(kind, tokens, taken) for (kind, tokens), taken in self.time.taken.items()])
            return result.write(options.out)

    def _fast(self) -> AbstractContextManager[None]:
        """Return `fast_linears`, whose trials take seconds; nothing where no time is left."""
        return fast_linears(self.model) if self.time.allows() else nullcontext()

    def _timings(self, policy: Policy, measure: bool) -> tuple[tuple[LengthTiming, ...], bool]:
        """Return the times of attention at several lengths, measured as far as time allows, and whether all are.

        Under a time budget, the first length beyond the texts that is faster sparse is the last one. What a busy
        machine measured in an earlier run is measured again, and what another machine or number of threads did.
        """
        lengths, machine = lengths_of(self.model, self.options.tokens), machine_facts()
        on = f"{machine.gpus if self.model.device.type == 'cuda' else machine.cpu}, {torch.get_num_threads()} threads"
        key = f"crossover {rules_digest(policy)} on {on} "
        known = {each["seqlen"]: LengthTiming(**each) for each in map(self.steps.get, self.steps.names(key))}
        wanted = [length for length in lengths if length not in known or known[length].busy] if measure else []
        for timing in self._timed(policy, wanted, urgent=not known):
            known[timing.seqlen] = timing
            self.steps.store(f"{key}{timing.seqlen}", asdict(timing))
            if self.time.seconds is not None and timing.seqlen > self.options.tokens and is_faster(timing):
                break
        found = tuple(sorted(known.values(), key=lambda each: each.seqlen))
        longer = (each.seqlen for each in found if each.seqlen > self.options.tokens and is_faster(each))
        longest = next(longer, math.inf)
        needed = {length for length in lengths if length <= longest}
        complete = bool(found) and (self.time.seconds is None or needed <= set(known))
        self.cut |= measure and not complete
        return found, complete

    def _timed(self, policy: Policy, lengths: Sequence[int], urgent: bool) -> Iterator[LengthTiming]:
        """Time attention; an urgent first length, which a verdict needs, may take the time of later steps."""
        count = int(urgent)
        with self.time.reserving_only() if urgent else nullcontext():
            first = list(time_lengths(self.model, policy, lengths[:count], time=self.time))
        yield from first
        yield from time_lengths(self.model, policy, lengths[count:], time=self.time)

    def _policy(self, tried: Tried) -> Policy:
        return self.trials.policy(self.layers, tried.candidate.budgets, self.scorer)

    def _result(self, task: Task | None, ended: Ended | None = None) -> TuneResult:
        """Return what was found so far. With a task, time its policy first; without, take a policy that was timed."""
        if task is not None:
            task.advance(0, "crossover against dense")
        passing = sparsest([self.tuned, self.uniform])
        if passing and task is not None:
            self._timings(self._policy(passing[0]), measure=True)
        timed = [Timed(each, self._policy(each), *self._timings(self._policy(each), False)) for each in passing]
        faster = [each for each in timed if (dense_below(each.timings) or math.inf) <= self.options.tokens]
        best = next(iter([*faster, *(each for each in timed if each.timings), *timed]), Timed())
        outcome = decide(
            best,
            self.options,
            ended=ended or ("time" if self.cut else "done"),
            tuned=self.tuned,
            usual=min(TuneOptions.tokens, longest_prompt(self.model)),
            needed=self._needed(),
        )
        return self._described(best, outcome)

    def _needed(self) -> float | None:
        """Return the expected seconds of another run until its search is done; None without a time budget."""
        if self.time.seconds is None:
            return None
        costs = 0.0 if self.tuned and not self.cut else self._costs_seconds(len(self.scorers))
        return self.before + self.time.reserved + costs + EXPECTED_PASSES * self.trials.pass_seconds

    def _described(self, found: Timed, outcome: Outcome) -> TuneResult:
        """Return the result with its policy and the evidence."""
        chosen, timings = found.tried, found.timings
        dense = [[1.0] * self.model.config.get_text_config().num_attention_heads for _ in self.layers]
        budgets = chosen.candidate.budgets if chosen else dense
        best = self.uniform.best if self.uniform else None
        options, parameter = self.options, next(self.model.parameters())
        given: dict[str, Any] = dict(tolerance=options.tolerance, tokens=options.tokens, kinds=options.kinds)
        given |= dict(hold=options.hold, block_size=self.block_size, seed=options.seed)
        result = TuneResult(
            model=options.name,
            tokens=options.tokens,
            tolerance=options.tolerance,
            scorer=repr(self.scorer),
            dense_perplexity=self.trials.dense_perplexity(),
            uniform=tuple(self.uniform.trials) if self.uniform else (),
            tuned=tuple(self.tuned.trials) if self.tuned else (),
            chosen=chosen.trial if chosen else None,
            best_uniform_density=best.trial.density if best else None,
            crossover=timings,
            budgets=tuple(tuple(row) for row in budgets),
            layers=self.layers,
            seconds=self.steps.seconds + self.time.spent,
            command=options.command,
            policy=found.policy or self.trials.policy(self.layers, dense, self.scorer),
            held_out=self.held_out,
            ended=outcome.ended,
            verdict=outcome.verdict,
            why=outcome.why,
            advice=outcome.advice,
            busy=any(timing.busy for timing in timings),
            about=about(self.model, self.text, **given),
        )
        dtype = str(parameter.dtype).removeprefix("torch.")
        return with_evidence(result, outcome.border or 0, parameter.device.type, dtype, longest_prompt(self.model))

    def _finished(self, result: TuneResult, task: Task) -> TuneResult:
        """Return the result with decode rules and a reference, as far as they are wanted and time allows."""
        options = self.options
        if options.decode:
            task.advance(0, "decode rules")
            result = self._with_decode(result, task)
        if options.reference:
            task.advance(0, "reference for drift")
            result = self._with_reference(result)
        return result

    def _with_reference(self, result: TuneResult) -> TuneResult:
        """Return the result with a policy that has a guard and a reference, or with the reason why it has none."""
        policy, time, steps = result.policy, self.time, self.steps
        if all(rule.phase == "decode" for rule in policy.rules):
            return dataclasses.replace(result, reference="none: prompts run dense")
        border, step = policy.border, f"reference {rules_digest(policy)}"
        if step not in steps and not time.allows(MIN_REQUESTS * time.expects(PASS, max(2, border))):
            return dataclasses.replace(result, reference="none: no time was left")

        def recorded() -> dict[str, Any]:
            found: Profile = record(
                policy,
                LoadedModel(self.model, self.tokenizer),
                split_text(self.text).calibration,
                time_budget=min(SHARE * (steps.seconds + time.spent), time.left),
                time_limit=time.left,
                seed=self.options.seed,
                command=self.options.command,
                progress=self.progress,
            )
            return found.model_dump(mode="json")

        try:
            found = Profile.model_validate(steps.remember(step, recorded))
        except ValueError as error:  # the policy is useful without a reference
            return dataclasses.replace(result, reference=f"none: {error}")
        said = f"{found.requests} prompts, {min(each.calls for each in found.layers)} calls a layer"
        return dataclasses.replace(result, policy=policy.replace(guard=Guard(), reference=found), reference=said)

    def _with_decode(self, result: TuneResult, task: Task) -> TuneResult:
        """Return the result with decode rules, if they preserve perplexity and save time."""
        options = self.options
        page_size = options.page_size or as_block_size(self.block_size)[1]
        stretches = options.stretches if len(self.texts.kinds) > 1 else max(SEARCH_TEXTS, options.stretches)
        if not self.time.allows():
            said = "no rule: no time was left to search for one"
            none = DecodeResult((), None, (), (), options.cuda_graph, None, said)
            return dataclasses.replace(result, decode=none, ended="time")
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
            has_time=self.time.allows,
        )
        return with_decode_rules(result, found, page_size, options.command)


def sparsest(guides: Sequence[Guide | None]) -> list[Tried]:
    """Return the trials that passed in any search, the sparsest first; of equal ones, that of the first search."""
    passing = [each for guide in guides if guide is not None for each in guide.tried if each.trial.passed]
    return sorted(passing, key=lambda each: each.trial.density)
