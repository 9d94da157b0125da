# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx validate`: all figures, and the checks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dynaxx.lab.validate.check import Check

if TYPE_CHECKING:
    from dynaxx.lab.tasks.result import SuiteResult
    from dynaxx.lab.validate.noise import Noise


@dataclass(frozen=True)
class KindRow:
    """The loss on one kind of text, on its held-out part.

    Attributes:
        kind: its name; what `--kinds` takes.
        label: its name for a reader.
        tokens: tokens compared.
        digest: short hash of the whole text.
        dense: dense perplexity.
        ratio: sparse over dense perplexity.
        error: standard error of the ratio.
    """

    kind: str
    label: str
    tokens: int
    digest: str
    dense: float
    ratio: float
    error: float


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
    """The whole prefill at one length: the fastest of interleaved runs, since disturbances only add time."""

    seqlen: int
    dense_seconds: float
    sparse_seconds: float
    speedup: float
    pairs: int
    dense_peak_mb: float | None  # peak of the process on a CPU, of the allocator on a GPU; None if unknown
    sparse_peak_mb: float | None


@dataclass(frozen=True)
class ValidationResult:
    """The result of `validate`. `passed` is True if all `checks` passed."""

    passed: bool
    checks: tuple[Check, ...]
    logits: LogitErrors
    perplexity: Perplexities
    tasks: tuple[TaskScore, ...]
    repetition: Repetition
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        checks = [{**asdict(check), "said": check.to_text()} for check in self.checks]
        suite = None if self.suite is None else self.suite.to_dict()
        return {**asdict(self), "checks": checks, "suite": suite, "advice": self.advice()}

    def advice(self) -> list[str]:
        """Return one sentence per failed check with its remedy."""
        failed = {check.name: check for check in self.checks if not check.passed}
        found = self._quality_advice(failed)
        slow = [row.seqlen for row in self.slow() if self._runs_sparse(row)]
        if slow:
            fast = [row.seqlen for row in self.speed if row.seqlen > max(slow) and row.speedup >= 1]
            said = "Leave slow lengths dense: raise `dense_below` and `sparse_from` in the policy to "
            found.append(said + (f"{min(fast):,} tokens." if fast else f"more than {max(slow):,} tokens."))
        if "slowdown" in failed:
            small = "a policy costs the host some tenths of a millisecond per pass, which shows in a small model. "
            said = "" if slow else f"It was slow at lengths that the policy leaves dense: {small}"
            found.append(said + "A busy machine disturbs the times; measure again on a quiet one.")
        return found

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
            lower = f" (about {(limit - 1) ** 2 / max(rises):.2g} would do here)" if rises and limit > 1 else ""
            found.append(f"Tune again with a lower --tolerance{lower}, or on more text of the kind that failed.")
        for row in [] if self.suite is None else self.suite.of("fails"):
            found.append(f"Tune again with `--hold {row.task}`: at {row.tokens:,} tokens the policy {row.why}.")
        return found

    def later_border(self, lengths: Iterable[int] = ()) -> int | None:
        """Return the next length from which prompts could run sparse, if only the check of speed failed.

        Args:
            lengths: candidates besides the timed lengths.

        Returns:
            The length, or None if another check failed, no slow prompt ran sparse, or there is no longer candidate.
        """
        slow = [row.seqlen for row in self.slow() if self._runs_sparse(row)]
        if not slow or {check.name for check in self.checks if not check.passed} != {"slowdown"}:
            return None
        fast = [row.seqlen for row in self.speed if row.speedup >= 1]
        return min((n for n in (*fast, *lengths) if n > max(slow)), default=None)

    def slow(self) -> list[SpeedRow]:
        """Return the lengths that fail the check of speed."""
        limit = next((check.limit for check in self.checks if check.name == "slowdown"), math.inf)
        return [row for row in self.speed if 1 / row.speedup > limit]

    def _runs_sparse(self, row: SpeedRow) -> bool:
        return self.sparse_from is not None and row.seqlen >= self.sparse_from

    def summary(self) -> str:
        """Return the checks, one line each."""
        lines = [f"{'pass' if check.passed else 'FAIL'}  {check.to_text()}" for check in self.checks]
        if self.suite is not None:
            lines.append(self.suite.summary())
        if self.noise is not None:
            lines.append(self.noise.summary())
        longest = max(self.speed, key=lambda row: row.seqlen, default=None)
        if longest is not None:
            lines.append(f"{longest.speedup:.2f}x dense at {longest.seqlen:,} tokens, density {self.density:.1%}")
        if not self.layer_calls["sparse_calls"]:
            lines.append("prompts run dense under this policy, so dense was compared with dense")
        lines += self.advice()
        return "\n".join(lines)
