# SPDX-License-Identifier: Apache-2.0
"""The result of `dynaxx tune`: all evaluated budgets, the chosen one, and the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dynaxx.lab.about import policy_digest
from dynaxx.lab.files import write_json
from dynaxx.lab.tune.crossover import LengthTiming
from dynaxx.lab.tune.decode import DecodeResult
from dynaxx.policy import Policy, save_policy

Ended = Literal["done", "time", "interrupted"]  # how a search ended
Verdict = Literal["sparse", "dense", "undecided"]  # what it found out
SAMPLE = "sample"  # name of the user's own text


@dataclass(frozen=True)
class KindTrial:
    """Result of one evaluated budget on one kind of text: perplexity over dense, and its standard error."""

    kind: str
    ratio: float
    error: float
    passed: bool
    tokens: int = 0  # evaluated tokens: fewer than there are if the first of them decide
    decided: bool = True  # whether more text would not change the result, or there is none


@dataclass(frozen=True)
class TaskTrial:
    """Result of one evaluated budget on one task: its loss in nats per answer token."""

    task: str
    drop: float
    informative: bool  # whether the dense model solves the task
    passed: bool


@dataclass(frozen=True)
class Trial:
    """One evaluated budget.

    It passes if the ratio plus twice its error is within the tolerance on every kind of text, and every task passes.
    A trial that fails ends at the kind that fails.
    """

    density: float  # measured mean density over sparse heads
    perplexity: float  # perplexity under the budget
    ratio: float  # perplexity over dense perplexity; the geometric mean over the kinds of text
    error: float  # standard error of the ratio
    passed: bool
    tokens: int = 0  # number of evaluated tokens
    kinds: tuple[KindTrial, ...] = ()  # the same figures for each kind of text, if there are several
    tasks: tuple[TaskTrial, ...] = ()  # results of the tasks that must pass
    aim: float = 0.0  # density that the texts for costs predict for the budgets, which orders the trials of a search
    decided: bool = True  # whether it failed or passed clearly, or used all of its text, before time ended

    def __post_init__(self) -> None:
        """Use the measured density as the aim if none was recorded."""
        if not self.aim:
            object.__setattr__(self, "aim", self.density)

    @property
    def rows(self) -> tuple[KindTrial, ...]:
        """Return the figures of each kind of text, also of a single one."""
        return self.kinds or (KindTrial(SAMPLE, self.ratio, self.error, self.passed, self.tokens),)


@dataclass(frozen=True)
class HeldOutKind:
    """Result of a policy, tuned on all kinds of text except one, on the excluded kind."""

    kind: str  # the excluded kind
    density: float | None  # of the sparsest budgets that pass on all others; None if none pass
    ratio: float | None = None  # None if no budgets were found, also for lack of time
    error: float | None = None
    passed: bool = False


@dataclass(frozen=True)
class Raised:
    """A raise of the border from `before` to `after` tokens.

    Validation found the whole prefill of `seqlen` tokens slower than dense.
    """

    before: int
    after: int
    seqlen: int
    dense_seconds: float
    sparse_seconds: float


@dataclass(frozen=True)
class TuneResult:
    """The result of `tune`; `.policy` is the document, `.to_dict()` the evidence that `tuning.json` holds."""

    model: str
    tokens: int
    tolerance: float
    scorer: str
    dense_perplexity: float | None  # None if there was no time for it
    uniform: tuple[Trial, ...]
    tuned: tuple[Trial, ...]
    chosen: Trial | None  # None if no sparse trial was within the tolerance
    best_uniform_density: float | None
    crossover: tuple[LengthTiming, ...]
    budgets: tuple[tuple[float, ...], ...]  # per layer of the policy and q head
    layers: tuple[int, ...]
    seconds: float
    command: str
    policy: Policy
    decode: DecodeResult | None = None  # None unless decode rules were requested
    reference: str = ""  # summary of the policy's reference, or why it has none
    raised: tuple[Raised, ...] = ()  # raises of the border by the validation
    held_out: tuple[HeldOutKind, ...] = ()  # results on excluded kinds, the worst first
    ended: Ended = "done"  # "time" if time was up, "interrupted" if stopped, before the search was done
    verdict: Verdict = "sparse"  # "dense" if that was found out, "undecided" if nothing was
    why: str = ""  # the verdict in one sentence
    advice: str = ""  # what to do next, if anything
    busy: bool = False  # whether other processes slowed the machine during a timing of the result
    about: Mapping[str, str] = field(default_factory=dict)  # digests, see `lab.about`

    @property
    def sparse_from(self) -> int | None:
        """The tokens from which prompts run sparse; None if they never do."""
        return self.policy.border if self.verdict == "sparse" else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        plain = asdict(dataclasses.replace(self, policy=None))  # type: ignore[arg-type]
        plain["about"] = {**self.about, "policy": policy_digest(self.policy)}  # later steps change the policy
        return {**plain, "sparse_from": self.sparse_from}

    def write(self, out: Path) -> TuneResult:
        """Write `policy.json` and `tuning.json` to a folder, each by one rename."""
        out.mkdir(parents=True, exist_ok=True)
        save_policy(self.policy, out / "policy.json")
        write_json(out / "tuning.json", self.to_dict())
        return self


def no_reference(tuning: Mapping[str, Any]) -> str:
    """Return a sentence if a sparse policy has no reference for drift although one was wanted, else an empty text."""
    kept, _, why = str(tuning.get("reference")).partition("none: ")
    wanted = bool(why) and not kept and tuning.get("verdict") == "sparse"
    return f"Drift cannot be measured, because no reference was recorded: {why}." if wanted else ""
