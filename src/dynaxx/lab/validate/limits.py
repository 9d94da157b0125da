# SPDX-License-Identifier: Apache-2.0
"""Hold the figures of a validation against the limits of a policy."""

from __future__ import annotations

from collections.abc import Sequence

from dynaxx.lab.tasks.result import SuiteResult
from dynaxx.lab.validate.check import Check
from dynaxx.lab.validate.result import KindRow, LogitErrors, Perplexities, Repetition, SpeedRow, TaskScore
from dynaxx.policy import Tolerances


def checks_of(
    limits: Tolerances,
    logits: LogitErrors,
    perplexity: Perplexities,
    tasks: Sequence[TaskScore],
    repetition: Repetition | None,
    speed: Sequence[SpeedRow],
    kinds: Sequence[KindRow] = (),
    suite: SuiteResult | None = None,
) -> tuple[Check, ...]:
    """Hold figures against what the policy sets a limit to.

    With few samples (tasks, generated text), only what exceeds a standard error counts, or chance alone would fail it.
    """
    worst_task = max(tasks, key=lambda task: task.logprob_drop - task.drop_error, default=None)
    at_most = [
        ("perplexity_ratio", perplexity.ratio, limits.perplexity_ratio, "", "held-out text of the sample"),
        *(("perplexity_ratio", row.ratio, limits.perplexity_ratio, "", row.label) for row in kinds),
        ("kl", logits.kl, limits.kl, "nats", ""),
        ("logits_mean_error", logits.mean_error, limits.logits_mean_error, "", ""),
    ]
    if worst_task is not None:
        drop, where = worst_task.logprob_drop - worst_task.drop_error, f"the task {worst_task.task!r}"
        at_most.append(("task_logprob_drop", drop, limits.task_logprob_drop, "nats", where))
    if repetition is not None:
        repeated = repetition.increase - repetition.increase_error
        at_most.append(("repetition_increase", repeated, limits.repetition_increase, "", ""))
    checks = [
        Check(name, value, limit, value <= limit, unit, where)
        for name, value, limit, unit, where in at_most
        if limit is not None
    ]
    if limits.slowdown is not None and speed:
        checks.append(slowdown_check(speed, limits.slowdown))
    if limits.top1_agreement is not None:
        agreement, least = logits.top1_agreement, limits.top1_agreement
        checks.append(Check("top1_agreement", agreement, least, agreement >= least))
    if suite is not None and limits.task_logprob_drop is not None:
        failed = suite.of("fails")
        names = ": " + ", ".join(f"{row.task} at {row.tokens:,} tokens" for row in failed) if failed else ""
        checks.append(Check("suite", float(len(failed)), 0.0, not failed, "", names))
    return tuple(checks)


def slowdown_check(speed: Sequence[SpeedRow], limit: float) -> Check:
    """Return the check of the length that decides: the slowest of those that fail, else of those that are unclear."""
    order = ("slow", "unclear", "fast")
    row = min(speed, key=lambda row: (order.index(row.against(limit)), row.speedup))
    figures = (1 / row.speedup, limit, row.against(limit) != "slow")
    return Check("slowdown", *figures, "", f"{row.seqlen:,} tokens", 1 / row.high, 1 / row.low)
