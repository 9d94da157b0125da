# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU kernels beside torch's: correct first, then medians of rounds that take turns in one process.

Useful FLOPs are 4 * head_dim * q_heads * visible (query, key) pairs forward and 10 * ... backward. Baselines: torch's
causal `scaled_dot_product_attention`, and a 2048 x 2048 x 2048 matmul as what the processor can do. On one thread times
are the thread's CPU time, which other work on the machine disturbs least; on more they are wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.suites.cpu_decode import time_decode
from benchmarks.suites.cpu_workloads import (
    HEADS,
    QUICK_SHAPES,
    SHAPES,
    Workload,
    workloads,
)
from benchmarks.suites.rows import Report, rows_named
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.kernels.attention import cpu
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import sparse_attention
from dynaxx.patterns import Full, SlidingWindow
from dynaxx.testing import check_forward, check_gradients, make_qkv, oracle_attention, random_case

GEMM = 2048
HALF = 2048  # tokens at which bf16 and fp16 are compared with fp32
SMALL = (64, 128, 256, 512)  # lengths at which full density is compared with dense attention
RELATIVE_ERROR = 2e-6
PARTS = ("small", "half", "decode")  # rows beside the workloads; the last two take long

Run = Callable[[], object]


def run_cpu_suite(
    quick: bool = False,
    threads: int | None = None,
    seed: int = 0,
    only: Sequence[str] = (),
    progress: Report | None = None,
    beat: Report = lambda note: None,
) -> dict[str, Any]:
    """Check the CPU backend on random problems, then time it beside torch.

    Args:
        quick: one shape of 4,096 tokens and fewer checks; about 20 seconds.
        threads: 1 by default; more are measured by wall clock.
        seed: of inputs and random blocks.
        only: of the rows, those whose name starts so: workloads, and "small", "half", "decode".
        progress: receives lines of text as results come, for example `print`.
        beat: receives what is running, many times between two lines.

    Returns:
        "backend" (what served), "threads", "clock", "checks" (cases passed), "relative_error" (against fp64), "rows"
        (one dict per workload and pass: shape, density, milliseconds, useful GF, times faster than SDPA, GF of the
        matmul and of SDPA in the same rounds), "small" (full density against SDPA at short lengths), "half" (bf16 and
        fp16 against fp32) and "decode" (steps over a long cache; neither with `quick`, unless named).

    Raises:
        RuntimeError: a check failed; then there are no times.
        ValueError: `only` names something that is none.
    """
    say = progress or (lambda line: None)
    shapes = QUICK_SHAPES if quick else SHAPES
    names = [*(workload.name for workload in workloads(*shapes[0][:2])), *PARTS]
    wanted = rows_named("only", only, names) if only else names[:-2] if quick else names
    before = torch.get_num_threads()
    torch.set_num_threads(threads or 1)
    try:
        checks = check_backend(60 if quick else 300, seed, beat)
        say(f"{cpu.cpu_status()}; {checks['cases']} random problems within budget")
        error = relative_error(seed)
        if not error <= RELATIVE_ERROR:
            raise RuntimeError(
                f"no times: the relative error against fp64 is {error:.1e}, allowed {RELATIVE_ERROR:.0e}"
            )
        rows = []
        for seqlen, head_dim, timed_pass, memory in shapes:
            timed = [workload for workload in workloads(seqlen, head_dim) if workload.name in wanted]
            rows += time_shape(timed, timed_pass, seed, say, memory, beat) if timed else []
        small = time_small(seed, say, beat) if "small" in wanted else []
        half = [row for size in (64, 128) for row in time_half(size, seed, say, beat)] if "half" in wanted else []
        decode = time_decode(partial(medians, beat=beat), seed, say) if "decode" in wanted else []
    finally:
        torch.set_num_threads(before)
    return {
        "backend": str(cpu.cpu_status()),
        "threads": threads or 1,
        "clock": _clock(threads or 1).__name__,
        "torch": torch.__version__,
        "checks": checks,
        "relative_error": error,
        "rows": rows,
        "small": small,
        "half": half,
        "decode": decode,
    }


# ---- correctness -----------------------------------------------------------------------------------------------------


def check_backend(cases: int, seed: int, beat: Report = lambda note: None) -> dict[str, int]:
    """Check random problems against the fp64 oracle, forward and (every fourth) gradients.

    Raises:
        RuntimeError: the first error over its budget.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, layout, return_lse=True, backend="cpu")
        return out, lse

    for index in range(cases):
        beat(f"problem {index + 1} of {cases} against fp64")
        case = random_case(seed + index, lengths=(17, 64, 65, 100, 129), head_dims=(32, 64, 80, 128))
        reports = check_forward(attend, case.q, case.k, case.v, case.layout)
        if index % 4 == 0:
            reports += check_gradients(attend, case.q, case.k, case.v, case.layout)
        for report in reports:
            if not report.ok:
                raise RuntimeError(f"no times: the backend is wrong. {report}; {case.label}")
    return {"cases": cases, "gradients": -(-cases // 4)}


def relative_error(seed: int) -> float:
    """Return the largest error of the output over its largest value, against fp64."""
    q, k, v = make_qkv(1, 2048, 2048, 2, 2, 64, seed=seed)
    layout = SlidingWindow(512).layout(2048, block_size=64)
    exact, _ = oracle_attention(q.double(), k.double(), v.double(), layout.to_dense())
    out, _ = cpu.attention_forward(q, k, v, layout, 64**-0.5)
    return float((out - exact).abs().amax() / exact.abs().amax())


# ---- times -----------------------------------------------------------------------------------------------------------


def time_shape(
    timed: list[Workload],
    timed_pass: str,
    seed: int,
    say: Report,
    memory: str = "heads first",
    beat: Report = lambda note: None,
) -> list[dict[str, Any]]:
    """Time workloads of one shape, SDPA and the matmul, in turns; SDPA reads the same memory."""
    seqlen, head_dim = timed[0].seqlen, timed[0].head_dim
    layouts = {workload.name: workload.layout(seed) for workload in timed}
    q, k, v = make_qkv(1, seqlen, seqlen, HEADS, HEADS, head_dim, seed=seed)
    if memory == "heads first":
        q, k, v = (_heads_first(x) for x in (q, k, v))
    runs: dict[str, Run] = {name: _sparse_run(q, k, v, layout, timed_pass) for name, layout in layouts.items()}
    runs |= {"sdpa": _dense_run(q, k, v, timed_pass), "gemm": _gemm_run(seed)}
    times = medians(runs, rounds=5 if seqlen <= 4096 else 3, beat=beat)
    flops = (4 if timed_pass == "forward" else 10) * head_dim * HEADS
    gemm_gf = 2e-9 * GEMM**3 / times["gemm"]
    sdpa_gf = 1e-9 * flops * seqlen * (seqlen + 1) / 2 / times["sdpa"]
    shape = f"{timed_pass} {seqlen} x {head_dim} x {HEADS} heads, {memory}"
    say(f"{shape}: matmul {gemm_gf:.0f} GF, causal SDPA {sdpa_gf:.0f} GF")
    rows = []
    for workload in timed:
        layout = layouts[workload.name]
        pairs = float(layout.visible_pairs().float().mean())
        gf = 1e-9 * flops * pairs / times[workload.name]
        row = {
            "pass": timed_pass,
            "memory": memory,
            "workload": workload.name,
            "seqlen": seqlen,
            "head_dim": head_dim,
            "heads": HEADS,
            "block_size": workload.block_size,
            "density": layout.density(),
            "ms": 1e3 * times[workload.name],
            "sdpa_ms": 1e3 * times["sdpa"],
            "useful_gf": gf,
            "gemm_gf": gemm_gf,
            "sdpa_gf": sdpa_gf,
            "of_gemm": gf / gemm_gf,
            "of_sdpa": gf / sdpa_gf,
            "times_faster": times["sdpa"] / times[workload.name],
        }
        rows.append(row)
        say(
            f"  {workload.name:<22} density {row['density']:.3f} {row['ms']:8.1f} ms {gf:6.1f} GF "
            f"{row['of_gemm']:.2f} of matmul {row['of_sdpa']:.2f} of SDPA {row['times_faster']:5.2f}x faster"
        )
    return rows


def time_small(seed: int, say: Report, beat: Report) -> list[dict[str, Any]]:
    """Time full density through the public function beside SDPA at short lengths."""
    rows = []
    for seqlen in SMALL:
        q, k, v = (_heads_first(x) for x in make_qkv(1, seqlen, seqlen, HEADS, HEADS, 64, seed=seed))
        layout = Full().layout(seqlen, block_size=16 if seqlen < 128 else 64)
        sparse = lambda q=q, k=k, v=v, layout=layout: sparse_attention(q, k, v, layout, backend="cpu")
        repeat = max(2, 2048 // seqlen)
        runs = {"sparse": _repeated(sparse, repeat), "sdpa": _repeated(_dense_run(q, k, v, "forward"), repeat)}
        times = medians(runs, rounds=15, beat=beat)
        row = {"seqlen": seqlen, "us": 1e6 * times["sparse"] / repeat, "sdpa_us": 1e6 * times["sdpa"] / repeat}
        row["times_faster"] = row["sdpa_us"] / row["us"]
        rows.append(row)
        say(f"full density, {seqlen} tokens: {row['us']:.0f} us, SDPA {row['sdpa_us']:.0f} us")
    return rows


def time_half(head_dim: int, seed: int, say: Report, beat: Report) -> list[dict[str, Any]]:
    """Time window 512 in bf16 and fp16 beside fp32, in turns."""
    layout = SlidingWindow(512).layout(HALF, block_size=64)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    rows = []
    wide = [_heads_first(x) for x in make_qkv(1, HALF, HALF, HEADS, HEADS, head_dim, seed=seed)]
    for timed_pass in ("forward", "backward"):
        runs: dict[str, Run] = {}
        for dtype in dtypes:
            q, k, v = (x.to(dtype) for x in wide)
            runs[str(dtype)] = _sparse_run(q, k, v, layout, timed_pass)
        times = medians(runs, rounds=9, beat=beat)
        for dtype in dtypes[1:]:
            row = {
                "pass": timed_pass,
                "dtype": str(dtype).removeprefix("torch."),
                "seqlen": HALF,
                "head_dim": head_dim,
                "ms": 1e3 * times[str(dtype)],
                "of_fp32": times[str(torch.float32)] / times[str(dtype)],
            }
            rows.append(row)
            say(f"{timed_pass} {HALF} x {head_dim}, {row['dtype']}: {row['ms']:.1f} ms, {row['of_fp32']:.2f}x fp32")
    return rows


def medians(runs: dict[str, Run], rounds: int, beat: Report = lambda note: None) -> dict[str, float]:
    """Return the median seconds of each, after a warm-up, one of each per round."""
    clock = _clock(torch.get_num_threads())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        beat(f"{name}: warm-up")
        run()
    for index in range(rounds):
        for name, run in runs.items():
            beat(f"{name}: round {index + 1} of {rounds}")
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _clock(threads: int) -> Callable[[], float]:
    return time.thread_time if threads == 1 else time.perf_counter


def _repeated(run: Run, times: int) -> Run:
    def repeat() -> None:
        for _ in range(times):
            run()

    return repeat


def _heads_first(x: Tensor) -> Tensor:
    """Copy a tensor to the memory order (batch, heads, seqlen, head_dim) of a kv cache; SDPA reads the same memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _gemm_run(seed: int) -> Run:
    a, b = torch.randn(2, GEMM, GEMM, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    out = torch.empty(GEMM, GEMM, dtype=torch.float32, device="cpu")
    return lambda: torch.mm(a, b, out=out)


def _sparse_run(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, timed_pass: str) -> Run:
    scale = q.shape[-1] ** -0.5
    if timed_pass == "forward":
        return lambda: cpu.attention_forward(q, k, v, layout, scale)
    out, lse = cpu.attention_forward(q, k, v, layout, scale)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu").to(
        out.dtype
    )
    return lambda: cpu.attention_backward(do, None, q, k, v, out, lse, layout, scale)


def _dense_run(q: Tensor, k: Tensor, v: Tensor, timed_pass: str) -> Run:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if timed_pass == "forward":
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
