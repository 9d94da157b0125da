# SPDX-License-Identifier: Apache-2.0
"""`dynaxx doctor --fuzz`: compare random problems with the fp64 oracle, forward and gradients."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dynaxx.core.build import supported_isas
from dynaxx.core.library import ISA_VARIABLE
from dynaxx.kernels.registry import ATTENTION
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.results import Result
from dynaxx.ops.dispatch import BACKENDS
from dynaxx.testing import Expected, Problem, random_memory, random_problem


@dataclass(frozen=True)
class Mismatch:
    """A problem with a wrong layout, or on which a backend fails or is wrong."""

    seed: int
    backend: str
    what: str
    case: str
    derived: ClassVar[tuple[str, ...]] = ("reproduce",)

    @property
    def reproduce(self) -> str:
        """Return the command that repeats the failure."""
        return f"dynaxx doctor --fuzz-seed {self.seed}    # {self.backend}: {self.what}; {self.case}"


@dataclass(frozen=True)
class FuzzResult(Result):
    """The number of correct problems per backend, their traits, and every mismatch."""

    derived = ("ok", "next_seed", "cases_per_second")

    first_seed: int
    cases: int
    checked: dict[str, int]  # problems served, by backend
    covered: dict[str, dict[str, int]]  # problems by trait, by kind of trait ("pattern", "scorer", ...)
    mismatches: tuple[Mismatch, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether cases ran and none failed."""
        return not self.mismatches and bool(self.checked)

    @property
    def next_seed(self) -> int:
        """The seed to continue from."""
        return self.first_seed + self.cases

    @property
    def cases_per_second(self) -> float:
        """Problems per second."""
        return self.cases / self.seconds

    def summary(self) -> str:
        """Return the text that the command prints."""
        lines = [
            f"{self.cases:,} random problems, forward and gradients, in {self.seconds:.0f} s "
            f"({self.cases_per_second:.1f} per second); continue with --seed {self.next_seed}",
            f"  served by: {_counts(self.checked)}",
            *(f"  {kind}: {_counts(counts)}" for kind, counts in self.covered.items()),
            *(f"FAIL  {each.reproduce}" for each in self.mismatches),
            "no mismatch" if self.ok else f"{len(self.mismatches)} mismatches",
        ]
        return "\n".join(lines)


def fuzz(
    seconds: float | None = 60.0,
    *,
    seed: int = 0,
    cases: int | None = None,
    device: torch.device | str = "cpu",
    isas: Sequence[str] = (),
    progress: Progress | None = None,
) -> FuzzResult:
    """Check random problems until the time is over.

    Consecutive seeds determine the problems: batches, ragged packed batches, merged results and buckets of requests;
    patterns, selectors and masks; lengths, heads, head_dims, blocks, dtypes, scales, strides. Every layout is compared
    with the definition of its rule, and every backend that serves a problem with the derived budgets of
    `dynaxx.testing`.

    Args:
        seconds: time limit, None for no limit; the current problem is finished.
        seed: seed of the first problem; the result names the seed to continue with.
        cases: also stop after this many problems.
        device: device of the tensors.
        isas: builds of the CPU core to check ("baseline", ..., "torch" for the gathers); by default the active build.
        progress: reports each problem.
    """
    if set(isas) - {*supported_isas(), "torch"}:
        raise ValueError(f"`isas` must be among {(*supported_isas(), 'torch')} on this processor, got {tuple(isas)}")
    if (seconds is not None and seconds < 0) or (cases is not None and cases < 1) or seconds is cases is None:
        raise ValueError(f"`seconds` must be >= 0 or `cases` >= 1, got {seconds} and {cases}")
    start, done, passed = time.monotonic(), 0, 0.0
    checked: Counter[str] = Counter()
    covered: dict[str, Counter[str]] = {}
    mismatches: list[Mismatch] = []
    total = seconds or cases
    with (progress or SilentProgress()).task("Random problems against the fp64 oracle", total=total) as task:
        while done == 0 or ((seconds is None or passed < seconds) and done != cases):
            problem, found = _check(seed + done, device, isas)
            mismatches += found
            if problem is not None:
                for kind, names in problem[0].traits.items():
                    covered.setdefault(kind, Counter()).update(names)
                checked.update(problem[1])
            done += 1
            before, passed = passed, time.monotonic() - start
            step = min(passed, seconds) - min(before, seconds) if seconds else 1
            task.advance(step, f"{done:,} problems, {len(mismatches)} mismatches")
    by_kind = {kind: dict(sorted(counts.items())) for kind, counts in sorted(covered.items())}
    return FuzzResult(seed, done, dict(checked), by_kind, tuple(mismatches), max(1e-9, time.monotonic() - start))


def _check(
    seed: int, device: torch.device | str, isas: Sequence[str]
) -> tuple[tuple[Problem, list[str]] | None, list[Mismatch]]:
    """Check one problem on the backends that serve it, and return mismatches. Exceptions count as mismatches."""
    try:
        problem = random_problem(seed, device)
        expected = Expected(problem, seed)
    except Exception as error:
        return None, [Mismatch(seed, "layout", f"{type(error).__name__}: {error}", "")]
    wrong = {}
    for backend in BACKENDS:
        if not ATTENTION.reasons(backend, problem.asks):
            for isa in isas if backend == "cpu" and isas else ("",):
                with _cpu_isa(isa):
                    wrong[f"{backend} {isa}".strip()] = _wrong(backend, problem, expected, seed)
    return (problem, list(wrong)), [Mismatch(seed, name, what, problem.label) for name, what in wrong.items() if what]


def _wrong(backend: str, problem: Problem, expected: Expected, seed: int) -> str:
    rng = random.Random(seed)
    try:
        reports = expected.reports(partial(problem.attend, backend=backend), lambda grad: random_memory(rng, grad)[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(str(report) for report in reports if not report.ok)


@contextmanager
def _cpu_isa(isa: str) -> Iterator[None]:
    """Use one build of the CPU core within the block, "" for the active one."""
    before = os.environ.get(ISA_VARIABLE)
    if isa:
        os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        if before is not None:
            os.environ[ISA_VARIABLE] = before
        elif isa:
            del os.environ[ISA_VARIABLE]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
