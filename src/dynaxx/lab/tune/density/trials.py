# SPDX-License-Identifier: Apache-2.0
"""`Trials`: evaluate budgets in the real model, on texts that the costs have not seen, and remember every result.

A kind of text passes if the rise of its loss plus `ERRORS` standard errors is within the tolerance. The rise is the
mean difference of the same tokens' losses, dense and sparse; other trials make it known from less text, see `rise_of`.
Kinds are evaluated one after the other, the one closest to the tolerance first, and stretch by stretch, until a kind
passes clearly by `CLEAR` errors, fails, or more text would not make the error smaller (`SETTLED`).
Several looks at a growing sample find more by chance than one look, hence the wider margin before the end. A kind fails
once it could pass only if the rest of its text changed the rise by more than `FUTILE` times what is expected by chance.
A trial that could pass only by such luck (`LATE`) in the time that is left ends undecided: the time is for another one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.transformers.apply_policy import apply, model_facts
from dynaxx.lab.kinds import label
from dynaxx.lab.perplexity import perplexity, token_losses
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.texts import float64
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.costs import Budgets, rule_of
from dynaxx.lab.tune.density.held_tasks import HeldTasks
from dynaxx.lab.tune.density.search_texts import SearchTexts
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import KindTrial, Trial
from dynaxx.layout import as_block_size
from dynaxx.policy import Policy, Rule, Tolerances
from dynaxx.selection import Hybrid, Scorer

LAST_QUERIES = 64  # last queries that see everything, which retrieval needs although perplexity does not
ERRORS = 2  # standard errors added to the rise of perplexity before the comparison with the tolerance
CLEAR = 3  # standard errors by which a candidate passes before all text is used
FUTILE = 2  # standard deviations of the change that the rest of a text is expected to make; a rise beyond them fails
LATE = 1  # the same for the part of the rest for which time is left; a trial with a rise beyond them ends undecided
SETTLED = 0.92  # error on all text over that so far from which more text says nothing new; 5 of 6 stretches have 0.91
DENSE = "dense text"  # name of the steps without a policy
TRIAL = "trial "  # start of the names of those with one
RUN = 512  # neighbouring tokens that count as one observation, because their changes depend on each other
MIN_RUNS = 8  # observations per stretch, at least


def silent(said: str) -> None:
    """Say nothing."""


class Trials:
    """Perplexity of a model under budgets, against its dense perplexity.

    Args:
        model: the model.
        texts: the texts of the search.
        steps: stored results of this run and of runs before it.
        options: tokens per text, the block size of the policies, and the tolerance.
        hold: tasks that a passing policy must still solve.
        time: the time budget. Without time, no further stretch of a kind is evaluated, so fewer kinds pass.
    """

    def __init__(
        self,
        model: Any,
        texts: SearchTexts,
        steps: Steps,
        options: TuneOptions,
        hold: HeldTasks | None,
        time: TimeBudget | None = None,
    ) -> None:
        self.time = time or TimeBudget()
        self.model, self.texts, self.steps, self.hold = model, texts, steps, hold
        assert options.block_size is not None, "`tune` sets the device's default"
        self.block_size, self.tolerance, self._tokens = options.block_size, options.tolerance, options.tokens
        self.say: Callable[[str], None] = silent  # called with what a trial has shown so far
        self.closeness: dict[str, float] = {}  # latest known rise by kind with errors, to begin with the worst
        self._dense: dict[int, Tensor] = {}  # loss of every token of each text that was used

    @property
    def tokens(self) -> dict[str, int]:
        """Return the number of tokens that a trial may use, by kind."""
        found: dict[str, int] = {}
        for stretch in self.texts.search:
            found[stretch.kind] = found.get(stretch.kind, 0) + stretch.ids.shape[1] - 1
        return found

    @property
    def pass_seconds(self) -> float:
        """Return the expected seconds of a pass over one text."""
        return self.time.expects(PASS, self.texts.search[0].ids.shape[1] - 1)

    def seconds(self, key: str = "") -> float:
        """Return the expected seconds of the first look at each kind in a trial, less what is stored."""
        first = [next(i for i, each in enumerate(self.texts.search) if each.kind == kind) for kind in self.texts.kinds]
        return sum(len(self._missing(key, index)) for index in first) * self.pass_seconds

    def _missing(self, key: str, index: int) -> list[str]:
        """Return which of the dense results and those of a trial, if there is a key, are not stored for a text."""
        return [name for name in (DENSE, key) if name and f"{name} {index}" not in self.steps]

    def dense(self, index: int) -> Tensor:
        """Return the dense loss of every token of one of the texts."""
        if index not in self._dense:
            losses = self.remembered(DENSE, None, index)["losses"]
            self._dense[index] = torch.tensor(losses, dtype=torch.float32, device="cpu")
        return self._dense[index]

    def dense_perplexity(self) -> float | None:
        """Return the dense perplexity over the first stretch of each kind; None unless all were evaluated."""
        first = {stretch.kind: index for index, stretch in reversed(list(enumerate(self.texts.search)))}
        if any(f"{DENSE} {index}" not in self.steps for index in first.values()):
            return None
        return perplexity(torch.cat([self.dense(index) for index in sorted(first.values())]))

    def rule(self, budget: float | tuple[float, ...], scorer: Scorer, tokens: int | None = None) -> Hybrid:
        """Return the rule of a budget on texts of so many tokens: the scorer's choice, and what is always visible."""
        floor = (tokens or self._tokens) // as_block_size(self.block_size)[1] // 2
        return rule_of(scorer, budget, self.block_size, LAST_QUERIES, floor)

    def key(self, budgets: Budgets, scorer: Scorer) -> str:
        """Return the key under which a trial is remembered."""
        ids = torch.tensor(budgets, dtype=torch.float32, device="cpu")
        return TRIAL + fingerprint(None, ids, rule=repr(self.rule(0.0, scorer)))

    def evaluate(
        self,
        density: float,
        budgets: Budgets,
        layers: Sequence[int],
        scorer: Scorer,
        kinds: Sequence[str] | None = None,
        stored: bool = False,
        densest: bool = False,
        late: bool = False,
    ) -> Trial | None:
        """Evaluate budgets on the texts of these kinds (all by default) until one kind fails.

        `density` is the one that the costs predict; the trial has the measured one too. With `stored`, nothing is run:
        the trial is that of the stored texts, and None if there are none. With `densest`, a kind fails early only by
        `ERRORS` standard errors, since that ends the search. With `late`, the trial ends undecided where the time left
        can hardly decide it.
        """
        policy, key = self.policy(layers, budgets, scorer), self.key(budgets, scorer)
        asked = [kind for kind in self.texts.kinds if kinds is None or kind in kinds]
        visited: list[float] = []
        every: list[Tensor] = []
        rows: dict[str, KindTrial] = {}
        for kind in sorted(asked, key=lambda kind: -self.closeness.get(kind, 0.0)):  # stable
            row = self._of_kind(kind, policy, key, every, visited, stored, densest, late and not stored)
            if row is None:
                break
            rows[kind] = row
            if not row.passed:
                break
        if not rows:
            return None
        each = [rows[kind] for kind in asked if kind in rows]
        passed = len(each) == len(asked) and all(row.passed for row in each)
        tasks = self.hold.under(policy, key) if self.hold is not None and passed and kinds is None else ()
        return Trial(
            density=sum(visited) / len(visited),
            aim=density,
            perplexity=perplexity(torch.cat(every)),
            ratio=math.exp(sum(math.log(row.ratio) for row in each) / len(each)),
            error=math.sqrt(sum(row.error**2 for row in each)) / len(each),
            passed=passed and all(task.passed for task in tasks),
            tokens=sum(row.tokens for row in each),
            kinds=tuple(each) if len(self.texts.kinds) > 1 else (),
            tasks=tasks,
            decided=passed or any(row.decided and not row.passed for row in each),
        )

    def _of_kind(
        self,
        kind: str,
        policy: Policy,
        key: str,
        every: list[Tensor],
        visited: list[float],
        stored: bool,
        densest: bool,
        late: bool,
    ) -> KindTrial | None:
        """Evaluate a policy on one kind of text, until the result is clear. Add its losses and densities to lists.

        With `stored`, only stored results count. None if there are none, or no time for the first one.
        """
        indices = [index for index, stretch in enumerate(self.texts.search) if stretch.kind == kind]
        others = self._others(key, indices)
        changes: list[Tensor] = []
        limit, mean, error, decided = math.log1p(self.tolerance), 0.0, math.inf, True
        for number, index in enumerate(indices, 1):
            missing = self._missing(key, index)
            # Whoever asks for a trial has time for its first passes.
            allows = lambda passes: not stored and (not every or self.time.allows(passes * self.pass_seconds))
            if missing and not allows(len(missing)):
                if DENSE == missing[0] != missing[-1] and allows(1):
                    self.dense(index)  # which the next run needs
                decided = False
                break
            found = self.remembered(key, policy, index)
            visited.append(found["density"])
            every.append(torch.tensor(found["losses"], dtype=torch.float32, device="cpu"))
            changes.append(self._change(found["losses"], index))
            rises = [rise_of(changes, other) for other in ((), *others)]
            rise = min(rises, key=lambda rise: rise.error(number))
            mean, error = rise.mean, rise.error(number)
            self.say(f"{label(kind)}: {math.expm1(mean):+.2%} on {sum(each.numel() for each in changes):,} tokens")
            excess, all_text = (mean - limit) / max(error, 1e-12), rise.error(len(indices))
            settled = all_text > SETTLED * error
            if settled or excess < -CLEAR or excess > (ERRORS if densest else _limit(all_text, error, FUTILE)):
                break
            fitting = number + self._fitting(key, indices[number:])
            if late and missing and fitting < len(indices) and excess > _limit(rise.error(fitting), error, LATE):
                decided = False
                break
        if not changes:
            return None
        self.closeness[kind] = mean + ERRORS * error
        passed = mean + ERRORS * error <= limit
        tokens = sum(change.numel() for change in changes)
        return KindTrial(kind, math.exp(mean), error, passed, tokens, decided)

    def _others(self, key: str, indices: Sequence[int]) -> list[list[Tensor]]:
        """Return the changes under each other stored trial, on the first of these texts that it has."""
        names = [name.rpartition(" ")[0] for name in self.steps.names(TRIAL)]
        has = lambda other, index: not self._missing(other, index)
        stored = lambda other, index: self._change(self.steps.get(f"{other} {index}")["losses"], index)
        return [
            [stored(other, index) for index in itertools.takewhile(partial(has, other), indices)]
            for other in dict.fromkeys(names)
            if other != key
        ]

    def _change(self, losses: Sequence[float], index: int) -> Tensor:
        """Return how losses of the tokens of one of the texts differ from the dense ones."""
        return float64(losses) - self.dense(index)

    def _fitting(self, key: str, indices: Sequence[int]) -> int:
        """Return how many of the next texts a trial can use in the time left."""
        passes = itertools.accumulate(len(self._missing(key, index)) for index in indices)
        return sum(self.time.allows(each * self.pass_seconds) for each in passes)

    def remembered(self, key: str, policy: Policy | None, index: int) -> dict[str, Any]:
        """Return the stored or computed `_losses` of one of the search texts."""
        found: dict[str, Any] = self.steps.remember(f"{key} {index}", lambda: self._losses(policy, index))
        return found

    def _losses(self, policy: Policy | None, index: int) -> dict[str, Any]:
        """Return the loss of every token of one of the search texts, dense or under a policy, and the density."""
        visited: list[float] = []
        handle = apply(self.model, policy) if policy is not None else None
        watched = handle.watch(lambda _, layout: visited.append(layout.density())) if handle else nullcontext()
        try:
            with watched, self.time.work(PASS, self.texts.search[index].ids.shape[1] - 1):
                found = token_losses(self.model, self.texts.search[index].ids)[0]
        finally:
            if handle is not None:
                handle.remove()
        layers = {layer for rule in policy.rules for layer in rule.layer_list(policy.model.layers)} if policy else {0}
        density = 1.0 - sum(1.0 - each for each in visited) / max(1, len(layers))  # layers without a layout are dense
        return {"losses": [round(value, 6) for value in found.tolist()], "density": density}

    def policy(self, layers: Sequence[int], budgets: Budgets, scorer: Scorer) -> Policy:
        """Return the policy of the budgets of each layer."""
        by_budgets: dict[tuple[float, ...], list[int]] = {}
        for layer, row in zip(layers, budgets, strict=True):
            by_budgets.setdefault(tuple(row), []).append(layer)
        rules = [
            Rule.of(self.rule(row[0] if len(set(row)) == 1 else row, scorer), layers=same)
            for row, same in by_budgets.items()
        ]
        return Policy(
            model=model_facts(self.model),
            block_size=self.block_size,
            rules=tuple(rules),
            tolerances=Tolerances(perplexity_ratio=1 + self.tolerance),
        )


def _limit(later: float, error: float, deviations: float) -> float:
    """Return the largest rise, in errors above the tolerance, that may pass with the error that more text gives it.

    With more text, the rise differs by about the square root of the difference of the squared errors.
    """
    share = later / max(error, 1e-12)
    return deviations * math.sqrt(max(0.0, 1 - share**2)) - ERRORS * share


class Rise(NamedTuple):
    """The mean change of tokens' losses, and what its standard error depends on."""

    mean: float
    variance: float  # of the changes of runs of tokens
    difference: float  # variance of their differences from another trial's changes
    runs: float  # per stretch
    stretches: int  # of the other trial

    def error(self, stretches: int) -> float:
        """Return the standard error of the mean if this trial uses so many stretches."""
        most = max(stretches, self.stretches) * self.runs
        return math.sqrt(self.variance / most + self.difference * (1 / (stretches * self.runs) - 1 / most))


def rise_of(changes: Sequence[Tensor], other: Sequence[Tensor] = ()) -> Rise:
    """Return the mean change of tokens' losses on several stretches.

    If another trial used more stretches, these ones first, the mean is that of the other trial, plus the mean
    difference between both on the stretches of this one (double sampling). Budgets of similar density change the same
    tokens alike, so that the difference is known from little text. The means of runs of neighbouring tokens are the
    observations, since the changes of neighbours depend on each other.
    """
    if len(other) <= len(changes):
        other = changes
    own, beside = _runs(changes), _runs(other)
    if own.numel() == 1:
        return Rise(float(own), math.inf, 0.0, 1.0, 1)
    both = beside[: own.numel()]
    variance, difference = beside.var() + own.var() - both.var(), (own - both).var()
    tokens = torch.cat(list(changes))
    mean = tokens.mean() + torch.cat(list(other)).mean() - torch.cat(list(other))[: tokens.numel()].mean()
    return Rise(float(mean), max(0.0, float(variance)), float(difference), own.numel() / len(changes), len(other))


def _runs(changes: Sequence[Tensor]) -> Tensor:
    """Return the mean of each run of neighbouring tokens."""
    split = lambda x: x.tensor_split(max(1, min(x.numel(), max(MIN_RUNS, x.numel() // RUN))))
    return torch.stack([run.mean() for change in changes for run in split(change)])
