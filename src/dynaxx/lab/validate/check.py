# SPDX-License-Identifier: Apache-2.0
"""Checks: a figure against a limit, and what that says in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaxx.lab.tasks.result import SuiteResult
    from dynaxx.lab.validate.result import KindRow, LogitErrors, Perplexities, Repetition, SpeedRow, TaskScore
    from dynaxx.policy import Tolerances

MOST_DIGITS = 6  # decimals at which a value and its limit are shown at most


@dataclass(frozen=True)
class Check:
    """One figure compared with one tolerance."""

    name: str
    value: float
    limit: float
    passed: bool
    unit: str = ""
    where: str = ""  # the text, the task or the length that the figure is of
    low: float | None = None  # interval of the value, where it is known
    high: float | None = None

    @property
    def unclear(self) -> bool:
        """Return whether the limit lies within the interval of the value, which fails nothing."""
        return self.passed and self.high is not None and self.high > self.limit

    @property
    def mark(self) -> str:
        """Return the result in one word."""
        return "unclear" if self.unclear else "pass" if self.passed else "FAIL"

    def to_text(self) -> str:
        """Return the check in words, with as many decimals as tell the value from its limit."""
        if self.name == "perplexity_ratio":
            value, limit = apart(100 * (self.value - 1), 100 * (self.limit - 1), 2)
            return f"perplexity {_signed(value)} % (limit {_signed(limit)} %) on {self.where or 'held-out text'}"
        if self.name == "top1_agreement":
            value, limit = apart(100 * self.value, 100 * self.limit, 1)
            return f"the most likely next token is the same for {value} % of the tokens (at least {limit} %)"
        if self.name == "slowdown":
            value, limit = apart(self.value, self.limit, 2)
            at = f" of {self.where}" if self.where else ""
            within = "" if self.low is None or self.high is None else f"; {self.low:.2f} to {self.high:.2f} measured"
            return f"prefill{at} takes {value} times as long as dense (limit {limit}{within})"
        if self.name == "repetition_increase":
            value, limit = apart(100 * self.value, 100 * self.limit, 1)
            return f"repeated 4-grams in generated text {_signed(value)} points (limit {_signed(limit)})"
        if self.name == "task_logprob_drop":
            value, limit = apart(self.value, self.limit, 3)
            return f"{value} nats lost per answer token (limit {limit}) on {self.where or 'retrieval tasks'}"
        if self.name == "suite":
            return f"{self.value:g} informative long-context tasks fail (limit {self.limit:g}){self.where}"
        value, limit = apart(self.value, self.limit, 4)
        return f"{self.name.replace('_', ' ')}: {value} {self.unit}".rstrip() + f" (limit {limit})"


def apart(value: float, limit: float, digits: int) -> tuple[str, str]:
    """Return both with the same decimals, more of them while they look the same and are not."""
    while value != limit and f"{value:.{digits}f}" == f"{limit:.{digits}f}" and digits < MOST_DIGITS:
        digits += 1
    shown = f"{value:.{digits}f}"
    return shown if float(shown) else shown.removeprefix("-"), f"{limit:.{digits}f}"


def _signed(number: str) -> str:
    return number if number.startswith("-") and float(number) else f"+{number.removeprefix('-')}"


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
        checks.append(_slowdown(speed, limits.slowdown))
    if limits.top1_agreement is not None:
        agreement, least = logits.top1_agreement, limits.top1_agreement
        checks.append(Check("top1_agreement", agreement, least, agreement >= least))
    if suite is not None and limits.task_logprob_drop is not None:
        failed = suite.of("fails")
        names = ": " + ", ".join(f"{row.task} at {row.tokens:,} tokens" for row in failed) if failed else ""
        checks.append(Check("suite", float(len(failed)), 0.0, not failed, "", names))
    return tuple(checks)


def _slowdown(speed: Sequence[SpeedRow], limit: float) -> Check:
    """Return the check of the length that decides: the slowest of those that fail, else of those that are unclear."""
    order = ("slow", "unclear", "fast")
    row = min(speed, key=lambda row: (order.index(row.against(limit)), row.speedup))
    figures = (1 / row.speedup, limit, row.against(limit) != "slow")
    return Check("slowdown", *figures, "", f"{row.seqlen:,} tokens", 1 / row.high, 1 / row.low)
