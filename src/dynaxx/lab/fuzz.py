"""`dynaxx doctor --fuzz`: random problems against the fp64 oracle, forward and gradients, as long as you like."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.problem import AttentionProblem
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.ops.dispatch import BACKENDS, unsupported_reasons
from dynaxx.testing import AttentionCase, ErrorReport, check_forward, check_gradients, random_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = 64  # a largest error over fewer numbers than this is a matter of chance: see `_within_budget`


@dataclass(frozen=True)
class Mismatch:
    """A problem on which a backend is wrong, or fails."""

    seed: int
    backend: str
    what: str
    case: str

    def reproduce(self) -> str:
        """The one line that shows it again."""
        return f"dynaxx doctor --fuzz-seed {self.seed}    # {self.backend}: {self.what}; {self.case}"


@dataclass(frozen=True)
class FuzzResult:
    """How many problems each backend was right on, and where one was not."""

    first_seed: int
    cases: int
    checked: dict[str, int]  # by backend: problems it served
    mismatches: tuple[Mismatch, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.mismatches and bool(self.checked)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "first_seed": self.first_seed,
            "cases": self.cases,
            "checked": self.checked,
            "seconds": self.seconds,
            "mismatches": [{**vars(each), "reproduce": each.reproduce()} for each in self.mismatches],
        }

    def summary(self) -> str:
        """What the command prints."""
        served = ", ".join(f"{backend} {count:,}" for backend, count in self.checked.items()) or "none"
        lines = [f"{self.cases:,} random problems, forward and gradients, in {self.seconds:.0f} s; served by: {served}"]
        lines += [f"FAIL  {each.reproduce()}" for each in self.mismatches]
        return "\n".join([*lines, "no mismatch" if self.ok else f"{len(self.mismatches)} mismatches"])


def fuzz(
    seconds: float = 60.0,
    *,
    seed: int = 0,
    cases: int | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> FuzzResult:
    """Check random problems until the time is over.

    Patterns, selectors, lengths, heads, head_dims, blocks and dtypes are drawn from consecutive seeds; every backend
    that serves a problem is held to the derived budgets of `dynaxx.testing`.

    Args:
        seconds: for how long; the problem under way is finished.
        seed: of the first problem.
        cases: stop after so many, too.
    """
    if seconds < 0 or (cases is not None and cases < 1):
        raise ValueError(f"`seconds` must be >= 0 and `cases` >= 1, got {seconds} and {cases}")
    start, done = time.monotonic(), 0
    checked: Counter[str] = Counter()
    mismatches: list[Mismatch] = []
    with (progress or SilentProgress()).task("Random problems against the fp64 oracle", total=seconds or None) as task:
        before = 0.0
        while done == 0 or (time.monotonic() - start < seconds and done != cases):
            for backend, wrong, label in _check(seed + done, device):
                checked[backend] += 1
                mismatches += [Mismatch(seed + done, backend, what, label) for what in wrong]
            done += 1
            now = time.monotonic() - start
            task.advance(min(now, seconds) - before, f"{done:,} problems, {len(mismatches)} mismatches")
            before = min(now, seconds)
    return FuzzResult(seed, done, dict(checked), tuple(mismatches), time.monotonic() - start)


def _check(seed: int, device: torch.device | str) -> list[tuple[str, list[str], str]]:
    """Of one problem: each backend that serves it, and what is wrong with its answers."""
    dtype = random.Random(seed).choice(DTYPES)
    case = random_case(seed, dtype=dtype, device=device)
    label = f"{str(dtype).removeprefix('torch.')} {case.label}"
    serving = [backend for backend in BACKENDS if not unsupported_reasons(backend, _problem(case))]
    return [(backend, _wrong(backend, case), label) for backend in serving]


def _wrong(backend: str, case: AttentionCase) -> list[str]:

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
        return sparse_attention(q, k, v, layout, return_lse=True, backend=backend)

    try:
        reports = check_forward(attend, case.q, case.k, case.v, case.layout)
        reports += check_gradients(attend, case.q, case.k, case.v, case.layout)
    except Exception as error:  # a crash of a backend is what a fuzzer looks for
        return [f"{type(error).__name__}: {error}"]
    return [str(report) for report in reports if not _within_budget(report, case)]


def _within_budget(report: ErrorReport, case: AttentionCase) -> bool:
    """The derived budget; where the eager error is that of a few numbers, a few roundings are allowed."""
    few = min(case.q[..., 0].numel(), case.k[..., 0].numel()) < FEW
    return report.ok or (few and report.error <= 16 * torch.finfo(case.q.dtype).eps)


def _problem(case: AttentionCase) -> AttentionProblem:
    batch, seqlen_q, q_heads, head_dim = case.q.shape
    return AttentionProblem(
        device=case.q.device,
        dtype=case.q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=case.k.shape[1],
        q_heads=q_heads,
        kv_heads=case.k.shape[2],
        head_dim=head_dim,
        head_dim_v=case.v.shape[-1],
        block_size=case.layout.block_size,
        needs_grad=True,
    )
