# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx validate`: all figures, and the checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from dynaxx.lab.results import Result, plain
from dynaxx.lab.tasks.result import SuiteResult
from dynaxx.lab.validate.check import Check
from dynaxx.lab.validate.noise import Noise
from dynaxx.policy import Tolerances

PAIRS_TO_FAIL = 5  # pairs that a small loss of speed needs; with three, chance alone fails one policy in eight
CLEAR = 1.25  # factor beyond the limit that needs fewer


@dataclass(frozen=True)
class KindRow:
    """The loss on one kind of text, on its held-out part."""

    kind: str  # its name; what `--kinds` takes
    label: str  # its name for a reader
    tokens: int  # tokens compared
    digest: str  # short hash of the whole text
    dense: float  # dense perplexity
    ratio: float  # sparse over dense perplexity
    error: float  # standard error of the ratio


@dataclass(frozen=True)
class LogitErrors:
    """Next-token logits under the policy compared with dense, over all held-out tokens."""

    max_error: float
    mean_error: float  # mean absolute error
    top1_agreement: float  # share of tokens with the same most likely next token
    kl: float  # mean KL(dense || sparse), nats


@dataclass(frozen=True)
class Perplexities:
    """Perplexity on held-out text."""

    dense: float
    sparse: float
    ratio: float
    ratio_second_half: float  # perplexity of each window's second half, where every token has a long context
    loss_dense: float
    loss_sparse: float
    tokens: int


@dataclass(frozen=True)
class TaskScore:
    """One retrieval task, averaged over its samples."""

    task: str
    dense_accuracy: float
    sparse_accuracy: float
    dense_logprob: float  # nats per answer token
    sparse_logprob: float
    logprob_drop: float
    drop_error: float  # standard error of the drop


@dataclass(frozen=True)
class Repetition:
    """The share of repeated 4-grams in greedily generated text, averaged over prompts."""

    dense: float
    sparse: float
    increase: float
    increase_error: float  # standard error
    same_tokens: float  # share of generated tokens that are equal


@dataclass(frozen=True)
class SpeedRow:
    """The whole prefill at one length that runs sparse: the pair of median speed-up, and the interval of all pairs."""

    seqlen: int  # tokens of the prompt
    dense_seconds: float  # the runs of that pair
    sparse_seconds: float
    speedup: float  # dense over sparse seconds
    pairs: int  # timed runs of each
    dense_peak_mb: float | None  # of the process on a CPU, of the allocator on a GPU; None if unknown
    sparse_peak_mb: float | None
    low: float  # interval of the speed-up, see `prefill_speed.interval`
    high: float
    dense_cpu_seconds: float | None = None  # of all threads, which a busy machine disturbs less; None on a GPU
    sparse_cpu_seconds: float | None = None
    busy: bool = False  # whether other processes disturbed the runs

    def to_text(self) -> str:
        """Return the speed in words."""
        cpu = ""
        if self.dense_cpu_seconds and self.sparse_cpu_seconds:
            cpu = f", {self.dense_cpu_seconds / self.sparse_cpu_seconds:.2f}x by CPU time"
        pairs = f"{self.low:.2f} to {self.high:.2f} in {self.pairs} pairs" if self.pairs > 1 else "one pair of runs"
        return f"{self.speedup:.2f}x the speed of dense ({pairs}{cpu})"

    def against(self, slowdown: float) -> Literal["fast", "slow", "unclear"]:
        """Return whether the prefill is surely within a limit of sparse over dense seconds, surely not, or neither.

        On a busy machine, CPU time must agree that it is slow.
        """
        if slowdown * self.low >= 1:
            return "fast"
        surely = self.pairs >= PAIRS_TO_FAIL or slowdown * self.high * CLEAR < 1
        if self.busy and self.dense_cpu_seconds and self.sparse_cpu_seconds:
            surely &= self.sparse_cpu_seconds > slowdown * self.dense_cpu_seconds
        return "slow" if slowdown * self.high < 1 and surely else "unclear"


@dataclass(frozen=True)
class ValidationResult(Result):
    """The result of `validate`. `passed` is True if all `checks` passed."""

    derived = ("busy",)

    passed: bool
    checks: tuple[Check, ...]
    logits: LogitErrors
    perplexity: Perplexities
    tasks: tuple[TaskScore, ...]
    repetition: Repetition | None  # None if time ended before
    speed: tuple[SpeedRow, ...]
    density: float  # visited / causally visible blocks over all layers that see the whole sequence, on held-out text
    layer_calls: dict[str, Any]  # sparse calls, and dense calls by reason, on held-out text
    windows: int
    window_tokens: int
    seed: int
    sparse_from: int | None = 0  # tokens from which the policy runs prompts sparse; None if it never does
    kinds: tuple[KindRow, ...] = ()  # other kinds of text, if requested
    suite: SuiteResult | None = None  # long-context tasks, if requested
    noise: Noise | None = None  # differences of the dense model itself, for comparison
    tuned_kinds: tuple[str, ...] = ()  # kinds of text that the policy was tuned on, by its evidence
    skipped: tuple[str, ...] = ()  # what was left out for lack of time

    @override
    def to_dict(self) -> dict[str, Any]:
        suite = None if self.suite is None else self.suite.to_dict()
        return {**plain(self), "suite": suite, "ended": "time" if self.skipped else "done", "advice": self.advice()}

    def advice(self) -> list[str]:
        """Return one sentence per failed check with its remedy."""
        failed = {check.name: check for check in self.checks if not check.passed}
        found = self._quality_advice(failed)
        slow = [row.seqlen for row in self.slow()]
        if slow:
            fast = [row.seqlen for row in self.speed if row.seqlen > max(slow) and row.speedup >= 1]
            said = "Leave slow lengths dense: raise `dense_below` and `sparse_from` in the policy to "
            found.append(said + (f"{min(fast):,} tokens." if fast else f"more than {max(slow):,} tokens."))
        if self.busy and any(check.name == "slowdown" and (check.unclear or not check.passed) for check in self.checks):
            found.append("Measure speed again on a quiet machine.")
        return found

    @property
    def busy(self) -> str:
        """Return the sentence that says when other processes disturbed the times; empty on a quiet machine."""
        lengths = [f"{row.seqlen:,}" for row in self.speed if row.busy]
        return f"The machine was busy while prompts of {' and '.join(lengths)} tokens were timed." if lengths else ""

    def _quality_advice(self, failed: dict[str, Check]) -> list[str]:
        """Return remedies for a loss of quality: other text to tune on, or a lower tolerance with its value."""
        found = []
        limit = next((check.limit for check in self.checks if check.name == "perplexity_ratio"), math.inf)
        worse = [row for row in self.kinds if row.ratio > limit]
        new = [row for row in worse if row.kind not in self.tuned_kinds]
        if new:
            names, labels = ",".join(row.kind for row in new), " and ".join(row.label for row in new)
            found.append(
                f"The policy was not tuned for {labels}; tune again with `--kinds {names}` in addition to your text."
            )
        known = [row.label for row in worse if row.kind in self.tuned_kinds]
        if known:
            found.append(
                f"The policy was tuned for {' and '.join(known)}, on other text; `--stretches 2` takes more of it, "
                "which makes the estimate surer."
            )
        if failed.keys() - {"slowdown"}:
            rises = [row.ratio - 1 for row in worse]
            rises += [c.value - 1 for c in self.checks if c.name == "perplexity_ratio" and not c.passed]
            lower = f", for example {(limit - 1) ** 2 / max(rises):.2g}," if rises and limit > 1 else ""
            lower = f"with a lower --tolerance{lower} or " if limit > 1 else ""
            found.append(f"Tune again {lower}on more text of the kind that failed.")
        for row in [] if self.suite is None else self.suite.of("fails"):
            found.append(f"Tune again with `--hold {row.task}`: at {row.tokens:,} tokens the policy {row.why}.")
        return found

    def later_border(self, lengths: Iterable[int] = ()) -> int | None:
        """Return the next length from which prompts could run sparse, if only the check of speed failed.

        Args:
            lengths: candidates besides the timed lengths.

        Returns:
            The length, or None if another check failed, no prompt is surely too slow, or there is no longer candidate.
        """
        slow = [row.seqlen for row in self.slow()]
        if not slow or {check.name for check in self.checks if not check.passed} != {"slowdown"}:
            return None
        fast = [row.seqlen for row in self.speed if row.speedup >= 1]
        return min((n for n in (*fast, *lengths) if n > max(slow)), default=None)

    def slow(self) -> list[SpeedRow]:
        """Return the lengths that fail the check of speed."""
        limit = next((check.limit for check in self.checks if check.name == "slowdown"), math.inf)
        return [row for row in self.speed if row.against(limit) == "slow"]

    def summary(self) -> str:
        """Return the checks, one line each."""
        lines = [f"{check.mark}  {check.said}" for check in self.checks]
        if self.suite is not None:
            lines.append(self.suite.summary())
        if self.noise is not None:
            lines.append(self.noise.summary())
        longest = max(self.speed, key=lambda row: row.seqlen, default=None)
        if longest is not None:
            lines.append(f"at {longest.seqlen:,} tokens: {longest.to_text()}")
        if self.sparse_from:
            lines.append(f"prompts of fewer than {self.sparse_from:,} tokens run dense and were not timed")
        lines.append(f"density {self.density:.1%} at {self.window_tokens:,} tokens")
        lines += [self.busy] if self.busy else []
        if self.skipped:
            lines.append(f"not measured for lack of time: {', '.join(self.skipped)}; `dynaxx validate` measures them")
        return "\n".join([*lines, *self.advice()])


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
