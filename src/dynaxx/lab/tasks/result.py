# SPDX-License-Identifier: Apache-2.0
"""Results of a suite: one row for each task and length, with confidence intervals and without a mean over tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dynaxx.storage import strict_json

Verdict = Literal["holds", "fails", "unclear", "not informative", "dense by policy"]

ANSWERED = 0.5  # a task is informative if the dense model finds this share of the answers,
KNOWN = 0.5  # or if the context raises the answers' log-probability by this many nats per token, beyond chance
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom, as in any table; above, the normal one is close
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL = 1.96


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def to_text(self, form: str = ".2f") -> str:
        """Return the mean and its interval as text."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def interval_of(values: Sequence[float]) -> Interval:
    """Return the mean and Student's interval, which is infinite for a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    freedom = len(values) - 1
    quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL + 2.4 / freedom
    error = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - error, mean + error)


def share_of(values: Sequence[float]) -> Interval:
    """Return a share and Wilson's interval, which has a width even if all values are 0 or 1."""
    n, mean = len(values), statistics.mean(values)
    spread = NORMAL**2 / n
    middle = (mean + spread / 2) / (1 + spread)
    error = NORMAL * math.sqrt(mean * (1 - mean) / n + spread / (4 * n)) / (1 + spread)
    return Interval(mean, max(0.0, middle - error), min(1.0, middle + error))


@dataclass(frozen=True)
class TaskRow:
    """One task at one length."""

    task: str
    tokens: int  # length of the prompts with their answers
    samples: int  # prompts
    dense_match: Interval  # share of the answers that greedy decoding finds
    sparse_match: Interval
    dense_logprob: float  # nats per answer token
    sparse_logprob: float
    drop: Interval  # dense minus sparse log-probability of the same prompts
    context_gain: Interval  # dense log-probability with the context minus without it
    verdict: Verdict  # whether the policy passes the task; "unclear" if there are too few samples to decide
    why: str  # explanation of the verdict
    preference: Interval | None = None  # log-probability of correct minus wrong answers, dense; None without wrong ones


@dataclass(frozen=True)
class SuiteResult:
    """All rows and their limit."""

    rows: tuple[TaskRow, ...]
    limit: float | None  # nats per answer token
    seed: int
    skipped: tuple[str, ...] = ()  # tasks and lengths that were skipped, and why

    @property
    def passed(self) -> bool:
        """Return whether no informative task fails."""
        return not self.of("fails")

    def of(self, verdict: Verdict) -> list[TaskRow]:
        """Return the rows with a verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return strict_json(asdict(self))

    def summary(self) -> str:
        """Return a table, one line for each task and length."""
        head = f"{'task':<16} {'tokens':>6}  {'dense':>6} {'sparse':>6}  {'lost per answer token, nats':<30} verdict"
        lines = [head]
        for row in self.rows:
            lost = row.drop.to_text("+.2f") if math.isfinite(row.drop.low) else f"{row.drop.mean:+.2f} (one sample)"
            lines.append(
                f"{row.task:<16} {row.tokens:>6,}  {row.dense_match.mean:>6.0%} {row.sparse_match.mean:>6.0%}  "
                f"{lost:<30} {row.verdict}"
            )
        counts = ", ".join(
            f"{len(self.of(v))} {v}"
            for v in ("holds", "fails", "unclear", "not informative", "dense by policy")
            if self.of(v)
        )
        return "\n".join([*lines, f"{len(self.rows)} rows: {counts}", *self.skipped])


def judged(
    task: str,
    tokens: int,
    dense: Sequence[tuple[float, float]],
    sparse: Sequence[tuple[float, float]],
    known: Sequence[float],
    limit: float | None,
    *,
    others: Sequence[float | None] = (),
    ran_sparse: bool = True,
) -> TaskRow:
    """Return the row of a task.

    Args:
        task: name of the task.
        tokens: length of the prompts.
        dense: (log-probability, match) of each sample, dense.
        sparse: (log-probability, match) of each sample, sparse.
        known: dense log-probability of each answer without the context.
        limit: allowed loss in nats per answer token; None means no limit.
        others: dense log-probability of wrong answers after the same prompt, for the samples that have some.
        ran_sparse: False where every call ran dense, so that dense was compared with dense.
    """
    drop = interval_of([before[0] - after[0] for before, after in zip(dense, sparse, strict=True)])
    gain = interval_of([before[0] - without for before, without in zip(dense, known, strict=True)])
    dense_match, sparse_match = (share_of([each[1] for each in found]) for found in (dense, sparse))
    gaps = [before[0] - other for before, other in zip(dense, others, strict=False) if other is not None]
    preference = interval_of(gaps) if gaps else None
    verdict, why = _verdict(dense_match, sparse_match, drop, gain, preference, limit)
    if not ran_sparse:
        verdict, why = "dense by policy", "the policy leaves prompts of this length dense"
    return TaskRow(
        task=task,
        tokens=tokens,
        samples=len(dense),
        dense_match=dense_match,
        sparse_match=sparse_match,
        dense_logprob=statistics.mean(each[0] for each in dense),
        sparse_logprob=statistics.mean(each[0] for each in sparse),
        drop=drop,
        context_gain=gain,
        verdict=verdict,
        why=why,
        preference=preference,
    )


def _verdict(
    dense: Interval,
    sparse: Interval,
    drop: Interval,
    gain: Interval,
    preference: Interval | None,
    limit: float | None,
) -> tuple[Verdict, str]:
    """Return the verdict of a row and its explanation."""
    learns = gain.low >= KNOWN if math.isfinite(gain.low) else gain.mean >= KNOWN
    if dense.mean < ANSWERED and not learns:
        return "not informative", (
            f"the dense model finds {dense.mean:.0%} of the answers, and its context makes them {gain.mean:+.2f} nats "
            "per token more likely"
        )
    if dense.mean < ANSWERED and not prefers(preference):
        assert preference is not None, "without wrong answers there is no preference to miss"
        return "not informative", (
            f"the dense model finds {dense.mean:.0%} of the answers, and does not tell them from other prompts' "
            f"answers: they are {preference.to_text('+.2f')} nats per token more likely"
        )
    by = "" if dense.mean >= ANSWERED else "; judged by likelihood: dense decoding finds few answers itself"
    if limit is None:
        return "holds", f"no limit is set{by}"
    if sparse.high < dense.low:
        return "fails", f"finds {sparse.mean:.0%} of the answers, dense {dense.mean:.0%}{by}"
    if math.isfinite(drop.low) and drop.low > limit:
        return "fails", f"loses {drop.to_text()} nats per answer token, limit {limit:g}{by}"
    if drop.high <= limit:
        return "holds", f"loses at most {drop.high:.2f} nats per answer token, limit {limit:g}{by}"
    return (
        "unclear",
        f"loses {drop.mean:.2f} nats per answer token, at most {drop.high:.2f}: more samples would tell{by}",
    )


def prefers(preference: Interval | None) -> bool:
    """Return whether correct answers are more likely than wrong ones beyond chance; True if that is unknown."""
    return preference is None or not math.isfinite(preference.low) or preference.low > 0
