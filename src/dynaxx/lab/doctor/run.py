# SPDX-License-Identifier: Apache-2.0
"""`dynaxx doctor`: describe the machine, list the backends that can serve a problem, and check their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import AttentionProblem
from dynaxx.kernels.registry import ATTENTION
from dynaxx.lab.doctor.gpu import GpuStatus, gpu_status
from dynaxx.lab.machine import Machine, machine_facts
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.ops.dispatch import BACKENDS
from dynaxx.patterns import Full, GlobalTokens, RandomBlocks, Sink, SlidingWindow
from dynaxx.storage import strict_json
from dynaxx.testing import ErrorReport, Expected, Problem, make_qkv, oracle_attention

ORACLE_BYTES = 256 * 2**20  # bytes of a seqlen x seqlen fp64 matrix; longer problems are checked at a shorter length
ROW_BYTES = 512 * 2**20  # bytes of q, k, v, out and gradients
QUICK_BLOCKS = 4  # blocks of the quick checks, which take seconds on any machine

BROKEN = "broken: "  # prefix of the reason of a backend that fails to report its reasons


@dataclass(frozen=True)
class BackendStatus:
    """One backend's reasons why it cannot serve the user's problem, by "forward" and "gradients"; none if it can."""

    name: str
    reasons: dict[str, tuple[str, ...]]

    @property
    def broken(self) -> bool:
        """Return whether the backend should work here and does not."""
        return any(reason.startswith(BROKEN) for reasons in self.reasons.values() for reason in reasons)


@dataclass(frozen=True)
class OracleCheck:
    """The comparison of one backend on one layout with the fp64 oracle."""

    backend: str
    what: str  # "forward" or "gradients"
    pattern: str
    reports: tuple[ErrorReport, ...]
    error: str = ""  # why it could not run

    @property
    def ok(self) -> bool:
        """Return whether the backend agrees with fp64."""
        return not self.error and all(report.ok for report in self.reports)


@dataclass(frozen=True)
class DoctorResult:
    """The result of `dynaxx doctor`."""

    machine: Machine
    problem: AttentionProblem  # the user's problem
    backends: tuple[BackendStatus, ...]
    chosen: dict[str, str]  # the backends that "auto" takes, "forward" and "gradients"; "" if none can serve
    checked_seqlen: int  # length of the checks; the oracle is quadratic, so it may be shorter than the problem
    checks: tuple[OracleCheck, ...]
    gpu: GpuStatus | None  # of the problem's GPU
    full: bool = True  # whether everything was checked, or the shortest problems that exercise each backend

    @property
    def ok(self) -> bool:
        """Return whether a backend was found, none is broken, and every check agrees."""
        whole = not any(backend.broken for backend in self.backends)
        return bool(self.chosen["forward"]) and whole and all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "ok": self.ok,
            "machine": self.machine.to_dict(),
            "problem": str(self.problem),
            "gpu": self.gpu.to_dict() if self.gpu else None,
            "backends": [
                {"name": backend.name}
                | {what: {"serves": not each, "reasons": list(each)} for what, each in backend.reasons.items()}
                for backend in self.backends
            ],
            "chosen": {what: name or None for what, name in self.chosen.items()},
            "full": self.full,
            "checked_seqlen": self.checked_seqlen,
            "checks": [
                {
                    "backend": check.backend,
                    "what": check.what,
                    "pattern": check.pattern,
                    "ok": check.ok,
                    "error": check.error or None,
                    "tensors": [
                        strict_json({"name": r.name, "error": r.error, "budget": r.budget}) for r in check.reports
                    ],
                }
                for check in self.checks
            ],
        }

    def summary(self) -> str:
        """Return the text that the command prints."""
        machine = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        lines = [
            f"machine   {machine.cpu}, {machine.cores} cores ({machine.threads} threads, {machine.cpu_capability}), "
            f"{machine.memory_gib} GiB, {', '.join(machine.gpus) or 'no GPU'}",
            f"versions  python {machine.python}, {versions}",
            f"problem   {self.problem}",
            *(self.gpu.lines() if self.gpu else ()),
            "",
        ]
        for backend in self.backends:
            for what, reasons in backend.reasons.items():
                mark = "-> auto picks it" if backend.name == self.chosen[what] else ""
                lines.append(f"{backend.name:<10} {what:<10} {'; '.join(reasons) or 'can serve ' + mark}".rstrip())
        shorter = "" if self.checked_seqlen == self.problem.seqlen_q else " (the oracle is quadratic)"
        shorter = shorter if self.full or not shorter else " (longer ones: --full)"
        lines += ["", f"against the fp64 oracle, at {self.checked_seqlen} tokens{shorter}:"]
        for check in self.checks:
            found = check.error or ", ".join(f"{r.name} {r.error:.1e} of {r.budget:.1e}" for r in check.reports)
            lines.append(
                f"{'pass' if check.ok else 'FAIL'}  {check.backend:<10} {check.what:<10} {check.pattern}: {found}"
            )
        verdict = "all checks passed" if self.ok else "a check failed: see FAIL or broken above"
        return "\n".join([*lines, "", verdict if self.chosen["forward"] else "no backend can serve this problem"])


def diagnose(
    *,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    seqlen: int = 1024,
    dtype: torch.dtype = torch.float32,
    block_size: int = 64,
    device: torch.device | str = "cpu",
    seed: int = 0,
    full: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> DoctorResult:
    """Collect every backend's reasons for a problem, and compare the usable backends with the fp64 oracle.

    The comparison takes seconds, on `QUICK_BLOCKS` blocks, or with `full` the longest problem that fits the oracle.
    `say` is called with the chosen backends before it begins.

    Raises:
        ValueError: sizes are invalid, or the heads are too large to be checked.
    """
    for name, value in (("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("seqlen", seqlen)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    if q_heads % kv_heads:
        raise ValueError(f"`q_heads` must be a multiple of `kv_heads`, got {q_heads} and {kv_heads}")
    checked_seqlen = _checked_seqlen(q_heads, head_dim, seqlen, block_size)
    checked_seqlen = checked_seqlen if full else min(checked_seqlen, QUICK_BLOCKS * block_size)
    problem = AttentionProblem(
        device=torch.device(device),
        dtype=dtype,
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        block_size=(block_size, block_size),
        needs_grad=False,
    )
    asked = {"forward": problem, "gradients": replace(problem, needs_grad=True)}
    backends = tuple(
        BackendStatus(name, {what: _reasons(name, each) for what, each in asked.items()}) for name in BACKENDS
    )
    chosen = {what: next((each.name for each in backends if not each.reasons[what]), "") for what in asked}
    picked = {what: name or "no backend" for what, name in chosen.items()}
    say(f"auto picks {picked['forward']} for this problem, {picked['gradients']} for its gradients")
    return DoctorResult(
        machine=machine_facts(),
        problem=problem,
        backends=backends,
        chosen=chosen,
        checked_seqlen=checked_seqlen,
        checks=_run_checks(
            replace(problem, seqlen_q=checked_seqlen, seqlen_k=checked_seqlen), backends, seed, progress
        ),
        gpu=gpu_status(problem.device),
        full=full,
    )


def _checked_seqlen(q_heads: int, head_dim: int, seqlen: int, block_size: int) -> int:
    """Return the longest length that fits the oracle's memory, at least one block."""
    matrix, rows = 8 * q_heads, 8 * 8 * q_heads * head_dim
    if min(seqlen, block_size) * rows > ROW_BYTES:
        most = ROW_BYTES // (8 * 8 * min(seqlen, block_size))
        raise ValueError(f"`q_heads` x `head_dim` must be at most {most:,} to be checked, got {q_heads * head_dim:,}")
    return min(seqlen, max(block_size, min(int((ORACLE_BYTES / matrix) ** 0.5), ROW_BYTES // rows)))


def _reasons(name: str, problem: AttentionProblem) -> tuple[str, ...]:
    """Return why a backend cannot serve. A backend that raises instead counts as broken."""
    try:
        return tuple(ATTENTION.reasons(name, problem))
    except Exception as error:
        return (f"{BROKEN}{type(error).__name__}: {error}",)


def _run_checks(
    problem: AttentionProblem, backends: tuple[BackendStatus, ...], seed: int, progress: Progress | None
) -> tuple[OracleCheck, ...]:
    seqlen, block = problem.seqlen_q, problem.block_size[0]
    rules = {
        "window and sink": SlidingWindow(max(1, seqlen // 8)) | Sink(4),
        "random blocks and global tokens": RandomBlocks(2, seed=seed) | GlobalTokens(3) | SlidingWindow(1),
        "dense": Full(),
    }
    layouts = {name: rule.layout(seqlen, block_size=block, device=problem.device) for name, rule in rules.items()}
    qkv = make_qkv(1, seqlen, seqlen, problem.q_heads, problem.kv_heads, problem.head_dim,
                   dtype=problem.dtype, device=problem.device, seed=seed)  # fmt: skip
    expected = cache(lambda pattern: _expected(qkv, layouts[pattern], problem))  # shared by all backends
    plan = [
        (backend.name, what, pattern)
        for backend in backends
        for what, reasons in backend.reasons.items()
        if not reasons
        for pattern in layouts
    ]
    checks = []
    with (progress or SilentProgress()).task("Checking against the fp64 oracle", len(plan)) as task:
        for name, what, pattern in plan:
            checks.append(_run_check(name, what, pattern, partial(expected, pattern), layouts[pattern]))
            task.advance(1, f"{name} {what}")
    return tuple(checks)


def _expected(qkv: tuple[Tensor, ...], layout: BlockLayout, asks: AttentionProblem) -> Expected:
    """Compute the results and gradients of one layout in fp64, and their error budgets."""
    mask = layout.to_dense()
    exact = lambda q, k, v: oracle_attention(q, k, v, mask)
    inputs = dict(zip(("q", "k", "v"), qkv, strict=True))
    return Expected(Problem(inputs, exact, exact, None, mask, None, asks, {}, ""))


def _run_check(
    name: str, what: str, pattern: str, expected: Callable[[], Expected], layout: BlockLayout
) -> OracleCheck:
    """Run one check. A backend that fails although it reported no reasons is a finding."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, layout, return_lse=True, backend=name)
        return out, lse

    try:
        if what == "forward":
            return OracleCheck(name, what, pattern, tuple(expected().forward(attend)))
        reports = expected().with_gradients(attend)
        return OracleCheck(name, what, pattern, tuple(each for each in reports if each.name.startswith("d")))
    except (RuntimeError, ValueError, TypeError, OSError, AttributeError) as error:
        return OracleCheck(name, what, pattern, (), f"{type(error).__name__}: {error}")
