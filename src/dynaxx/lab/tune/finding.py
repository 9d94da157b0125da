# SPDX-License-Identifier: Apache-2.0
"""Search the scorer and the budgets of the heads, at any time the best ones so far.

Every step is stored, good or bad, and the next search with the same settings starts from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from dynaxx.lab.kinds import label
from dynaxx.lab.progress import Task
from dynaxx.lab.tune.costing import SCORER_DENSITY, Costing, stored_trials
from dynaxx.lab.tune.costs import Costs
from dynaxx.lab.tune.density.candidates import Candidate, TunedCandidates, UniformCandidates
from dynaxx.lab.tune.density.guide import FIRST, Guide, Tried
from dynaxx.lab.tune.density.rises import Rises
from dynaxx.lab.tune.density.trials import ERRORS, silent
from dynaxx.lab.tune.result import HeldOutKind, Trial

SEARCH_STEPS = 10  # trials of budgets per head in one run, at most
UNIFORM_STEPS = 6  # trials of one budget for all heads, at most
FINE_ENOUGH = 1.02  # ratio of the passing to the failing density at which a search ends
UNIFORM_FINE = 1.15  # the same for one budget for all heads, which only shows what budgets per head gain
CROSSOVER_PASSES = 0.5  # passes over a text that the timing of attention takes about as long as
TRIALS = 3  # trials that the texts of early ones are sized for


class Finding(Costing):
    """The search: what it tried and found so far."""

    tuned: Guide | None = None
    uniform: Guide | None = None
    held_out: tuple[HeldOutKind, ...] = ()

    def _search(self, task: Task) -> None:
        """Search the scorer and the budgets of the heads, until the search is done or time is up."""
        task.advance(0, "dense perplexity")
        self._shorten_costs()
        rises = Rises(self.options.tolerance, ERRORS, self.trials.tokens, self._text_share)
        with self._leaving_a_trial():
            if not self._has_time(self.trials.seconds()):
                return
            self.trials.dense(0)  # refuses a model whose activations are not finite, before long work
            self._shorten_costs()  # or not, now that a whole pass was timed
            costs = self._costs_by_kind(rises, task)
        if costs is None:
            return
        of_tasks = self._task_costs() if self.hold is not None else None
        candidates = TunedCandidates(costs, self.scorer, of_tasks)
        self.trials.closeness.update(candidates.at(SCORER_DENSITY).predicted)
        self.tuned = Guide(candidates, rises, FINE_ENOUGH, first=FIRST)
        self._run("tuned", self.tuned, SEARCH_STEPS, task)
        if self.time.seconds is None or self.tuned.is_done():
            self.uniform = Guide(UniformCandidates(candidates), rises.again(), UNIFORM_FINE)
            best = self.tuned.best if self.time.seconds is not None else None
            self._run("uniform", self.uniform, UNIFORM_STEPS, task, only_below=best.candidate.aim if best else None)
        if self.options.held_out:
            self.held_out = self._leave_one_out(costs, of_tasks, rises, task)

    @contextmanager
    def _leaving_a_trial(self) -> Iterator[None]:
        """Reserve time for the first trial, at the cost of the validation if there is too little for both.

        If not even a trial fits, what the next run needs may take all the time.
        """
        missing = self._missing(self._name(0), self.scorers[0])
        costs = self._costs_seconds(1, 1) if missing else 0.0
        first = lambda: len(self.texts.kinds) * self.trials.pass_seconds
        fits = lambda: self.time.allows(self.trials.seconds() + costs)
        for reserve in (self.time.reserving(first), self.time.reserving_only(lambda: self.timing_seconds + first())):
            with reserve:
                if fits():
                    yield
                    return
        with self.time.reserving_only():
            yield

    @property
    def timing_seconds(self) -> float:
        """Return the expected seconds of timing attention."""
        return CROSSOVER_PASSES * self.trials.pass_seconds

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
        prefix = stored_trials(name, self.scorer)
        layers = sum(
            len(self.layers) - len(self._missing(self._name(index), self.scorer))
            for index in range(len(self.texts.costs))
        )
        for record in map(self.steps.get, self.steps.names(prefix)):
            candidate = guide.candidates.of(record["budgets"])
            trial = self._evaluated(candidate, kinds, guide, stored=True)
            if trial is not None:
                guide.learn(candidate, trial, bounds=record["layers"] == layers)

        def evaluate(candidate: Candidate) -> Trial | None:
            settled = bool(guide.tried) and not guide.unsettled
            if only_below is not None and settled and guide.bounds()[1] > only_below:
                return None
            key = self.trials.key(candidate.budgets, self.scorer)
            # While nothing passes, there is nothing to validate.
            whole = guide is self.tuned and guide.best is None
            with self.time.reserving_only(lambda: self.timing_seconds) if whole else nullcontext():
                if not self._has_time(self.trials.seconds(key), urgent=whole and not guide.tried):
                    return None
                best = f"; so far {_said(guide.best.trial)}" if guide.best else ""
                trying = f"trying {candidate.aim:.1%} of the blocks, {name}{best}"
                task.advance(0, trying)
                self.trials.say = lambda said: task.advance(0, f"{trying}; {said}")
                self.steps.store(prefix + key, {"budgets": candidate.budgets, "layers": layers})
                trial = self._evaluated(candidate, kinds, guide)
                self.trials.say = silent
            if trial is not None:
                task.advance(int(kinds is None), f"{name}: {_said(trial)}")
            return trial

        if only_below is not None:
            start = only_below / math.sqrt(guide.fine)
        guide.run(evaluate, steps, start)
        self.cut |= bool(guide.unsettled)

    def _text_share(self) -> float:
        """Return the share of the text that each of the next trials can use in the time left."""
        seconds = 2 * TRIALS * len(self.texts.search) * self.trials.pass_seconds
        return 1.0 if seconds <= self.time.left else max(0.0, self.time.left) / seconds

    def _evaluated(
        self, candidate: Candidate, kinds: Sequence[str] | None, guide: Guide | None = None, stored: bool = False
    ) -> Trial | None:
        """Evaluate a candidate; the densest one of the tuned budgets fails only clearly, since that ends the search."""
        given = (candidate.aim, candidate.budgets, self.layers, self.scorer)
        densest = guide is not None and guide is self.tuned and guide.is_densest(candidate.aim)
        late = guide is not None and guide.best is not None
        return self.trials.evaluate(*given, kinds=kinds, stored=stored, densest=densest, late=late)

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


def _said(trial: Trial) -> str:
    """Return the density and the rise of perplexity of a trial, and the rise of the kind closest to failing."""
    said = f"{trial.density:.1%} of the blocks, perplexity {trial.ratio - 1:+.2%}"
    if trial.kinds:
        worst = max(trial.kinds, key=lambda row: math.log(row.ratio) + ERRORS * row.error)
        said += f", {label(worst.kind)} {worst.ratio - 1:+.2%}"
    return said + (" passes" if trial.passed else " fails" if trial.decided else " is undecided")
