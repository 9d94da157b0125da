# SPDX-License-Identifier: Apache-2.0
"""`Trials`: evaluate budgets in the real model, on texts that the costs have not seen, and remember every result.

A kind of text passes if the rise of its loss plus `ERRORS` standard errors is within the tolerance. The rise is the
mean difference of the same tokens' losses, dense and sparse. Kinds are evaluated one after the other, the one closest
to the tolerance first, and stretch by stretch, until a kind's result is clear by `CLEAR` errors or its text ends.
Several looks at a growing sample find more by chance than one look, hence the wider margin before the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaxx.lab.perplexity import perplexity, token_losses
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tune.costs import Budgets, rule_of
from dynaxx.lab.tune.density.held_tasks import HeldTasks
from dynaxx.lab.tune.density.search_texts import SearchTexts
from dynaxx.lab.tune.result import KindTrial, Trial
from dynaxx.layout import as_block_size
from dynaxx.selection import Hybrid, Scorer

if TYPE_CHECKING:
    from dynaxx.policy import Policy, SharedChoice

LAST_QUERIES = 64  # last queries that see everything, which retrieval needs although perplexity does not
ERRORS = 2  # standard errors added to the rise of perplexity before the comparison with the tolerance
CLEAR = 3  # standard errors by which a result is clear before all text is used
RUN = 512  # neighbouring tokens that count as one observation, because their changes depend on each other
LEAST_RUNS = 8  # observations per stretch, at least


class Trials:
    """Perplexity of a model under budgets, against its dense perplexity.

    Args:
        model: the model.
        texts: the texts of the search.
        steps: stored results of this run and of runs before it.
        tokens: tokens per text.
        block_size: block size of the policies, or (q_block, kv_block).
        tolerance: largest relative rise of perplexity.
        hold: tasks that a passing policy must still solve.
        has_time: a function of seconds. Without time, no further stretch of a kind is evaluated, so fewer kinds pass.
    """

    def __init__(
        self,
        model: Any,
        texts: SearchTexts,
        steps: Steps,
        tokens: int,
        block_size: int | tuple[int, int],
        tolerance: float,
        hold: HeldTasks | None,
        has_time: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        self._has_time = has_time
        self.model, self.texts, self.steps, self.hold = model, texts, steps, hold
        self.block_size, self.tolerance = block_size, tolerance
        self.floor = tokens // as_block_size(block_size)[1] // 2
        self.pass_seconds = 0.0  # seconds of the slowest pass over one text
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
    def evaluation_seconds(self) -> float:
        """Return the most seconds that the next trial may take."""
        texts = len(self.texts.search)
        return self.pass_seconds * (2 * texts - len(self._dense))

    def dense(self, index: int) -> Tensor:
        """Return the dense loss of every token of one of the texts."""
        if index not in self._dense:
            self._dense[index] = torch.tensor(
                self.remembered("dense text", None, index)["losses"], dtype=torch.float32, device="cpu"
            )
        return self._dense[index]

    def dense_perplexity(self) -> float:
        """Return the dense perplexity over the first stretch of each kind."""
        first = {stretch.kind: index for index, stretch in reversed(list(enumerate(self.texts.search)))}
        return perplexity(torch.cat([self.dense(index) for index in sorted(first.values())]))

    def rule(self, budget: float | tuple[float, ...], scorer: Scorer) -> Hybrid:
        """Return the rule of a budget: the scorer's choice, and what is always visible."""
        return rule_of(scorer, budget, self.block_size, LAST_QUERIES, self.floor)

    def key(self, budgets: Budgets, scorer: Scorer, shared: Sequence[SharedChoice] = ()) -> str:
        """Return the key under which a trial is remembered."""
        sharing = {"shared": [each.model_dump() for each in shared]} if shared else {}
        return "trial " + fingerprint(
            None, torch.tensor(budgets, dtype=torch.float32, device="cpu"), rule=repr(self.rule(0.0, scorer)), **sharing
        )

    def evaluate(
        self,
        density: float,
        budgets: Budgets,
        layers: Sequence[int],
        scorer: Scorer,
        kinds: Sequence[str] | None = None,
        shared: Sequence[SharedChoice] = (),
    ) -> Trial:
        """Evaluate budgets on the texts of these kinds (all by default) until one kind fails.

        `density` is the one that the costs predict; the trial has the measured one too. `shared` is the policy's field.
        """
        policy, key = self.policy(layers, budgets, scorer, shared), self.key(budgets, scorer, shared)
        asked = [kind for kind in self.texts.kinds if kinds is None or kind in kinds]
        visited: list[float] = []
        every: list[Tensor] = []
        rows: dict[str, KindTrial] = {}
        for kind in sorted(asked, key=lambda kind: -self.closeness.get(kind, 0.0)):  # stable
            rows[kind] = self._of_kind(kind, policy, key, every, visited)
            if not rows[kind].passed:
                break
        each = [rows[kind] for kind in asked if kind in rows]
        passed = all(row.passed for row in each)
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
        )

    def _of_kind(self, kind: str, policy: Policy, key: str, every: list[Tensor], visited: list[float]) -> KindTrial:
        """Evaluate a policy on one kind of text, until the result is clear. Add its losses and densities to lists."""
        indices = [index for index, stretch in enumerate(self.texts.search) if stretch.kind == kind]
        changes: list[Tensor] = []
        limit = math.log1p(self.tolerance)
        for index in indices:
            found = self.remembered(key, policy, index)
            visited.append(found["density"])
            every.append(torch.tensor(found["losses"], dtype=torch.float32, device="cpu"))
            changes.append((every[-1] - self.dense(index)).double())
            mean, error = mean_and_error(changes)
            if abs(mean - limit) > CLEAR * error or not self._has_time(2 * self.pass_seconds):
                break
        self.closeness[kind] = mean + ERRORS * error
        passed = mean + ERRORS * error <= limit
        return KindTrial(kind, math.exp(mean), error, passed, sum(change.numel() for change in changes))

    def remembered(self, key: str, policy: Policy | None, index: int) -> dict[str, Any]:
        """Return the stored or computed `_losses` of one of the search texts."""
        found: dict[str, Any] = self.steps.remember(f"{key} {index}", lambda: self._losses(policy, index))
        return found

    def _losses(self, policy: Policy | None, index: int) -> dict[str, Any]:
        """Return the loss of every token of one of the search texts, dense or under a policy, and the density."""
        from dynaxx.integrations.transformers.apply_policy import apply

        started = time.monotonic()
        visited: list[float] = []
        handle = apply(self.model, policy) if policy is not None else None
        watched = handle.watch(lambda _, layout: visited.append(layout.density())) if handle else nullcontext()
        try:
            with watched:
                found = token_losses(self.model, self.texts.search[index].ids)[0]
        finally:
            if handle is not None:
                handle.remove()
        self.pass_seconds = max(self.pass_seconds, time.monotonic() - started)
        layers = {layer for rule in policy.rules for layer in rule.layer_list(policy.model.layers)} if policy else {0}
        density = 1.0 - sum(1.0 - each for each in visited) / max(1, len(layers))  # layers without a layout are dense
        return {"losses": [round(value, 6) for value in found.tolist()], "density": density}

    def policy(
        self, layers: Sequence[int], budgets: Budgets, scorer: Scorer, shared: Sequence[SharedChoice] = ()
    ) -> Policy:
        """Return the policy of the budgets of each layer, with its field `shared`."""
        from dynaxx.integrations.transformers.apply_policy import model_facts
        from dynaxx.policy import Policy, Rule, Tolerances

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
            shared=tuple(shared),
            tolerances=Tolerances(perplexity_ratio=1 + self.tolerance),
        )


def mean_and_error(changes: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean change of tokens' losses on several stretches, and its standard error.

    The means of runs of neighbouring tokens are the observations. The changes of neighbours depend on each other, so
    the error of the mean is larger than their number alone suggests.
    """
    means = []
    for change in changes:
        runs = max(1, min(change.numel(), max(LEAST_RUNS, change.numel() // RUN)))
        means += [run.mean() for run in change.tensor_split(runs)]
    observed = torch.stack(means)
    error = float(observed.std() / observed.numel() ** 0.5) if observed.numel() > 1 else math.inf
    return float(torch.cat(list(changes)).mean()), error
