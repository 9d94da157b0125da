# SPDX-License-Identifier: Apache-2.0
"""Measure the GPU kernels beside their peers: correct first, then median times in one process, then useful TF/s.

Useful FLOPs are 4 * head_dim * q_heads * visible (query, key) pairs forward and 2.5 times that backward; those of a
dense peer are its own. A ratio is a peer's time over ours: above 1 we are faster. Selection and the building of layouts
are in none of these times.
"""

from __future__ import annotations

import gc
import importlib.metadata
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.suites.gpu_peers import PEERS
from benchmarks.suites.gpu_workloads import WORKLOADS, Workload, sampled_workloads
from benchmarks.suites.rows import Report, rows_named
from torch import Tensor

from dynaxx.kernels.registry import ATTENTION
from dynaxx.ops.attention import sparse_attention
from dynaxx.ops.checks import check_inputs

CHECKED = ("hopper", "triton")
BACKENDS = ("auto", "triton")  # that are timed
KINDS = ("forward", "backward")
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "nvidia-cudnn-frontend")
QUICK = ("random 10 %", "window 1024")
DIFFERENT = 2e-2  # relative error in norm between two bf16 results of the same attention


def run_gpu_suite(
    quick: bool = False,
    seed: int = 0,
    only: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    sample: int = 0,
    progress: Report | None = None,
) -> dict[str, Any]:
    """Check the GPU backends on random problems, then time them and their peers.

    Args:
        quick: two workloads, and no peer that compiles (FlexAttention for a minute, FlashAttention 4 for seconds).
        seed: of the random blocks and of the inputs.
        only: workloads whose name starts so; all by default.
        peers: those whose name starts so, as "flex"; all by default.
        sample: as many random problems in place of the workloads, drawn by the seed.
        progress: receives lines of text as results come, for example `print`.

    Returns:
        "device", "versions", "checks" (problems passed by backend), "rows" (one dict per workload and implementation:
        ms, TF/s and peak MiB above the inputs, forward and backward, of ours the ratio to each peer; or "skipped" with
        the reason), "ratios" (`ratios_to_peers`).

    Raises:
        RuntimeError: no GPU, or a check that failed: then there are no times.
        ValueError: `only` or `peers` names something that is none.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the GPU suite needs a CUDA GPU; none is visible to torch")
    say = progress or (lambda line: None)
    device = torch.device("cuda", torch.cuda.current_device())
    names = [workload.name for workload in WORKLOADS]
    wanted = rows_named("only", only, names) if only else QUICK if quick else names
    named = tuple(workload for workload in WORKLOADS if workload.name in wanted)
    workloads = sampled_workloads(sample, seed) if sample else named
    beside_ours = [] if quick and peers is None else peers_named(peers)
    versions = {name: _version(name) for name in PACKAGES}
    card = torch.cuda.get_device_name(device)
    say(f"{card}, " + ", ".join(f"{package} {version}" for package, version in versions.items()))
    checks = {
        backend: check_backend(backend, workloads, device, cases=2 if quick else 4, seed=seed) for backend in CHECKED
    }
    say("problems checked against fp64: " + ", ".join(f"{backend} {count}" for backend, count in checks.items()))
    found: dict[str, Any] = {"device": card, "versions": versions, "checks": checks, "rows": []}
    for workload in workloads:
        found["rows"] += time_workload(workload, device, seed, beside_ours, say)
    found["ratios"] = ratios_to_peers(found["rows"])
    for name, each in found["ratios"].items():
        say(f"{name}: worst {each['worst']:.2f}x ({each['at']}), median {each['median']:.2f}x of {each['of']}")
    return found


def ratios_to_peers(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by peer and kind the worst ratio and its workload, the median, and the number of workloads.

    Ours is the backend that `auto` takes: the first of `BACKENDS` that serves a workload.
    """
    served: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("ratio"):
            served.setdefault(row["workload"], row["ratio"])
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for workload, ratio in served.items():
        for peer, times in ratio.items():
            for kind, each in times.items():
                by_kind.setdefault(f"{peer}, {kind}", []).append((each, workload))
    return {
        name: {
            "worst": min(found)[0],
            "at": min(found)[1],
            "median": statistics.median(each for each, _ in found),
            "of": len(found),
        }
        for name, found in by_kind.items()
    }


def peers_named(names: Sequence[str] | None) -> list[str]:
    """Return the peers whose names start like one of `names`, or all peers.

    Raises:
        ValueError: a name of none.
    """
    return list(PEERS) if names is None else rows_named("peers", names, list(PEERS))


def check_backend(backend: str, workloads: Sequence[Workload], device: torch.device, *, cases: int, seed: int) -> int:
    """Check random problems against fp64, forward and gradients, by the workloads' kernels; return how many it served.

    Raises:
        RuntimeError: an error over its derived budget.
    """
    from dynaxx.testing.expected import Expected
    from dynaxx.testing.problems import random_problem

    served = 0
    for head_dim, block, softcap in dict.fromkeys((each.head_dim, each.block_size, each.softcap) for each in workloads):
        for case in range(seed, seed + cases):
            problem = random_problem(
                case,
                device,
                dtype=torch.bfloat16,
                head_dims=(head_dim, head_dim),
                block_size=(block, block),
                memories=("contiguous",),
                softcaps=(softcap,),
                from_data=0.0,
                biased=0.0,
            )
            if ATTENTION.reasons(backend, problem.asks):
                continue
            expected = Expected(problem, case)
            for report in expected.reports(partial(problem.attend, backend=backend)):
                if not report.ok:
                    raise RuntimeError(
                        f"{backend} is wrong, so it is not timed: {report}; seed {case}, {problem.label}"
                    )
            served += 1
    return served


def time_workload(
    workload: Workload, device: torch.device, seed: int, peers: Sequence[str], say: Report
) -> list[dict[str, Any]]:
    """Time a workload on dynaxx's backends and the named peers; return its rows."""
    layout = workload.layout(device, seed)
    q, k, v = workload.inputs(device, seed)
    flops = workload.flops(layout)
    common = {"workload": workload.name, "seqlen": workload.seqlen, "density": round(layout.to("cpu").density(), 4)}
    rows, expected = [], None
    for backend in BACKENDS:
        run = partial(sparse_attention, layout=layout, softcap=workload.softcap, backend=backend)
        row = {**common, "implementation": backend}
        as_batch = (q, k, v) if q.ndim == 4 else (q[None], k[None], v[None])
        problem = check_inputs(*as_batch, layout, softcap=workload.softcap)
        if why := [] if backend == "auto" else ATTENTION.reasons(backend, problem):
            rows.append(row | {"skipped": "; ".join(why)})
            continue
        if expected is None:
            with torch.no_grad():
                expected = run(q, k, v)
        rows.append(row | _forward(run, (q, k, v), flops) | _backward(run, (q, k, v), flops))
    for name in peers:
        row = {**common, "implementation": name}
        dense = "dense" in name
        its_flops = workload.dense_flops if dense else flops
        skipped = "skipped"
        try:
            run_peer = PEERS[name](workload, layout)
            if not dense and expected is not None:
                _agree(run_peer, (q, k, v), expected)
            row |= _forward(run_peer, (q, k, v), its_flops)
            skipped = "backward_skipped"
            row |= _backward(run_peer, (q, k, v), its_flops)
        except Exception as error:  # a peer that is absent, or does not serve the shape, must not cost the other rows
            row[skipped] = _reason(error)
        rows.append(row)
    by_name = {row["implementation"]: row for row in rows}
    for backend in BACKENDS:
        by_name[backend] |= {"ratio": _ratios(by_name[backend], [by_name[name] for name in peers])}
    for row in rows:
        say(_line(row))
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def _agree(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], expected: Tensor) -> None:
    with torch.no_grad():
        out = run(*inputs)
    error = float((out.float() - expected.float()).norm() / expected.float().norm())
    if not error <= DIFFERENT:
        raise RuntimeError(f"gives another result than ours: relative error {error:.1e}")


def _reason(error: Exception) -> str:
    """Return an error's type and the line of its message that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = next((line for line in lines if "Error: " in line), lines[-1] if lines else "")
    return f"{type(error).__name__}: {why}"[:160]


def _forward(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], flops: int) -> dict[str, float]:
    """Return the median ms, TF/s and peak MiB above what is there before, of a forward without gradients."""

    def forward() -> None:
        with torch.no_grad():
            run(*inputs)

    return _measured("forward", forward, flops)


def _backward(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], flops: int) -> dict[str, float]:
    """Time a backward in the same way."""
    out = run(*inputs)
    do = torch.randn_like(out)
    return _measured("backward", lambda: torch.autograd.grad(out, inputs, do, retain_graph=True), 2.5 * flops)


def _measured(kind: str, run: Callable[[], object], flops: float) -> dict[str, float]:
    from triton.testing import do_bench

    run()
    mib = _peak_mib(run)
    ms = do_bench(run, warmup=20, rep=60, return_mode="median")
    return {f"{kind}_ms": round(ms, 4), f"{kind}_tflops": round(flops / ms / 1e9, 1), f"{kind}_mib": round(mib, 1)}


def _peak_mib(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _ratios(ours: dict[str, Any], peers: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each peer's time over ours, forward and backward."""
    if "skipped" in ours:
        return {}
    return {
        peer["implementation"]: {
            kind: peer[f"{kind}_ms"] / ours[f"{kind}_ms"] for kind in KINDS if f"{kind}_ms" in peer
        }
        for peer in peers
        if "skipped" not in peer
    }


def _line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:>18} {row['density']:.3f} {row['implementation']:<18}"
    if "skipped" in row:
        return f"{head} skipped: {row['skipped']}"
    parts = [
        f"{kind} {row[f'{kind}_ms']:8.3f} ms {row[f'{kind}_tflops']:4.0f} TF/s {row[f'{kind}_mib']:6.0f} MiB"
        for kind in KINDS
        if f"{kind}_ms" in row
    ]
    if "backward_skipped" in row:
        parts.append(f"backward skipped: {row['backward_skipped']}")
    ratios = (
        f"{peer.removesuffix(', dense')} {'/'.join(f'{each[kind]:.2f}' if kind in each else '-' for kind in KINDS)}x"
        for peer, each in row.get("ratio", {}).items()
    )
    return "  ".join([head, *parts, *ratios])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
