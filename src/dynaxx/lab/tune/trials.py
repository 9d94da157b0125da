# SPDX-License-Identifier: Apache-2.0
"""`Trials`: evaluate budgets in the real model, on texts that the costs have not seen, and remember every result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynaxx.lab.perplexity import perplexity, token_losses
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tune.costs import Budgets, rule_of
from dynaxx.lab.tune.held_tasks import HeldTasks
from dynaxx.lab.tune.result import KindTrial, Trial
from dynaxx.lab.tune.search_texts import SearchTexts
from dynaxx.layout import as_block_size
from dynaxx.selection import Hybrid, Scorer

if TYPE_CHECKING:
    from dynaxx.policy import Policy, SharedChoice

LAST_QUERIES = 64  # last queries that see everything, which retrieval needs although perplexity does not
ERRORS = 2  # standard errors added to the rise of perplexity before the comparison with the tolerance


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
    ) -> None:
        self.model, self.texts, self.steps, self.hold = model, texts, steps, hold
        self.block_size, self.tolerance = block_size, tolerance
        self.floor = tokens // as_block_size(block_size)[1] // 2
        self.evaluation_seconds = 0.0  # seconds of the slowest evaluation
        self.dense: list[Tensor] = []  # loss of every token of each text

    def measure_dense(self) -> None:
        """Measure the dense losses, which `evaluate` compares with."""
        texts = range(len(self.texts.search))
        self.dense = [torch.tensor(self.remembered("dense text", None, i)["losses"]) for i in texts]

    def rule(self, budget: float | tuple[float, ...], scorer: Scorer) -> Hybrid:
        """Return the rule of a budget: the scorer's choice, and what is always visible."""
        return rule_of(scorer, budget, self.block_size, LAST_QUERIES, self.floor)

    def key(self, budgets: Budgets, scorer: Scorer, shared: Sequence[SharedChoice] = ()) -> str:
        """Return the key under which a trial is remembered."""
        sharing = {"shared": [each.model_dump() for each in shared]} if shared else {}
        return "trial " + fingerprint(None, torch.tensor(budgets), rule=repr(self.rule(0.0, scorer)), **sharing)

    def evaluate(
        self,
        density: float,
        budgets: Budgets,
        layers: Sequence[int],
        scorer: Scorer,
        kinds: Sequence[str] | None = None,
        shared: Sequence[SharedChoice] = (),
    ) -> Trial:
        """Evaluate budgets on the texts of these kinds (all by default) until one text fails.

        `density` is the one that the costs predict; the trial has the measured one too. `shared` is the policy's field.
        """
        policy, key = self.policy(layers, budgets, scorer, shared), self.key(budgets, scorer, shared)
        by_kind: dict[str, list[tuple[Tensor, Tensor]]] = {}
        visited: list[float] = []
        for index, stretch in enumerate(self.texts.search):
            if kinds is not None and stretch.kind not in kinds:
                continue
            found = self.remembered(key, policy, index)
            losses = torch.tensor(found["losses"])
            visited.append(found["density"])
            by_kind.setdefault(stretch.kind, []).append((self.dense[index], losses))
            mean, error = _change(by_kind[stretch.kind])
            if mean - ERRORS * error > _log_limit(self.tolerance):
                break
        rows = []
        for kind, pairs in by_kind.items():
            mean, error = _change(pairs)
            passed = mean + ERRORS * error <= _log_limit(self.tolerance)
            rows.append(KindTrial(kind, float(torch.tensor(mean).exp()), error, passed))
        every = [pair for pairs in by_kind.values() for pair in pairs]
        mean, error = _change(every)
        passed = all(row.passed for row in rows)
        tasks = self.hold.under(policy, key) if self.hold is not None and passed and kinds is None else ()
        return Trial(
            density=sum(visited) / len(visited),
            aim=density,
            perplexity=perplexity(torch.cat([after for _, after in every])),
            ratio=float(torch.tensor(mean).exp()),
            error=error,
            passed=passed and all(task.passed for task in tasks),
            tokens=sum(after.numel() for _, after in every),
            kinds=tuple(rows) if len(self.texts.kinds) > 1 else (),
            tasks=tasks,
        )

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
        spent = len(self.texts.search) * (time.monotonic() - started)
        self.evaluation_seconds = max(self.evaluation_seconds, spent)
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


def _change(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the mean rise of the loss from dense to sparse, and its standard error."""
    change = torch.cat([after - before for before, after in pairs]).double()
    return float(change.mean()), float(change.std() / change.numel() ** 0.5)


def _log_limit(tolerance: float) -> float:
    return float(torch.tensor(1 + tolerance, dtype=torch.float64).log())
