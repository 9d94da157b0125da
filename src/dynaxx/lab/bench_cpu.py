"""Measure the CPU kernels beside torch's: correct first, then medians of rounds that take turns in one process.

Useful FLOPs are 4 * head_dim * q_heads * visible (query, key) pairs forward and 10 * ... backward. Baselines: torch's
causal `scaled_dot_product_attention`, and a 2048 x 2048 x 2048 matmul as what the processor can do. On one thread times
are the thread's CPU time, which other work on the machine disturbs least; on more they are wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dynaxx.kernels import cpu
from dynaxx.lab.bars import Bar, Report
from dynaxx.lab.bench_cpu_decode import time_decode
from dynaxx.layout import BlockLayout
from dynaxx.ops.attention import sparse_attention
from dynaxx.patterns import Full, SlidingWindow
from dynaxx.testing import check_forward, check_gradients, make_qkv, oracle_attention, random_case

HEADS = 8
GEMM = 2048
SMALL = (64, 128, 256, 512)  # lengths at which full density meets dense attention
RELATIVE_ERROR = 2e-6

Run = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """One causal shape; `window`, or `density` of random blocks, or neither for full density."""

    name: str
    seqlen: int
    head_dim: int = 64
    window: int | None = None
    density: float | None = None
    block_size: int = 64

    def layout(self, seed: int) -> BlockLayout:
        if self.window is not None:
            return SlidingWindow(self.window).layout(self.seqlen, block_size=self.block_size)
        if self.density is not None:
            return random_causal_layout(self.seqlen, self.density, self.block_size, seed)
        return Full().layout(self.seqlen, block_size=self.block_size)


def run_cpu_suite(
    quick: bool = False, threads: int | None = None, seed: int = 0, progress: Report | None = None
) -> dict[str, Any]:
    """Check the CPU backend on random problems, then time it beside torch.

    Args:
        quick: one shape of 4,096 tokens and fewer checks; about 20 seconds.
        threads: 1 by default; more are measured by wall clock.
        seed: of inputs and random blocks.
        progress: receives lines of text as results come, for example `print`.

    Returns:
        "backend" (what served), "threads", "clock", "checks" (cases passed), "rows" (one dict per workload and pass:
        shape, density, milliseconds, useful GF, times faster than SDPA, GF of the matmul and of SDPA in the same
        rounds), "small" (full density against SDPA at short lengths), "decode" (steps over a long cache; not with
        `quick`) and "bars" (each with bar, value, ok).

    Raises:
        RuntimeError: a check failed; then there are no times.
    """
    say = progress or (lambda line: None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or 1)
    try:
        checks = check_backend(60 if quick else 300, seed)
        say(f"{cpu.cpu_status()}; {checks['cases']} random problems within budget")
        error = relative_error(seed)
        bars = [Bar("relative error against fp64", RELATIVE_ERROR, error, "window 512, 2048 tokens", at_most=True)]
        rows = []
        for seqlen, head_dim, timed_pass, memory in QUICK_SHAPES if quick else SHAPES:
            rows += time_shape(_workloads(seqlen, head_dim), timed_pass, seed, say, memory)
        small = time_small(seed, say)
        decode = [] if quick else time_decode(medians, seed, say)
        bars += bars_of(rows) + bars_of_small(small) + bars_of_decode(decode)
    finally:
        torch.set_num_threads(before)
    for bar in bars:
        say(str(bar))
    return {
        "backend": str(cpu.cpu_status()),
        "threads": threads or 1,
        "clock": _clock(threads or 1).__name__,
        "torch": torch.__version__,
        "checks": checks,
        "relative_error": error,
        "rows": rows,
        "small": small,
        "decode": decode,
        "bars": [bar.as_dict() for bar in bars],
    }


def random_causal_layout(seqlen: int, density: float, block_size: int, seed: int) -> BlockLayout:
    """Per head, the diagonal and random blocks before it: `density` of each row's visible blocks, at least one."""
    blocks = -(-seqlen // block_size)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(1, HEADS, blocks, blocks, generator=generator)
    column, row = torch.arange(blocks), torch.arange(blocks)[:, None]
    order = order.masked_fill(column > row, -1.0).masked_fill(column == row, 2.0)
    kept = ((row + 1) * density).round().clamp(min=1)
    rank = order.argsort(-1, descending=True).argsort(-1)
    return BlockLayout.from_block_indices(torch.where(rank < kept, column, -1), seqlen, block_size=block_size)


# ---- correctness -----------------------------------------------------------------------------------------------------


def check_backend(cases: int, seed: int) -> dict[str, int]:
    """Random problems against the fp64 oracle, forward and (every fourth) gradients.

    Raises:
        RuntimeError: the first error over its budget.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, layout, return_lse=True, backend="cpu")
        return out, lse

    for index in range(cases):
        case = random_case(seed + index, lengths=(17, 64, 65, 100, 129), head_dims=(32, 64, 80, 128))
        reports = check_forward(attend, case.q, case.k, case.v, case.layout)
        if index % 4 == 0:
            reports += check_gradients(attend, case.q, case.k, case.v, case.layout)
        for report in reports:
            if not report.ok:
                raise RuntimeError(f"no times: the backend is wrong. {report}; {case.label}")
    return {"cases": cases, "gradients": -(-cases // 4)}


def relative_error(seed: int) -> float:
    """Largest error of the output over its largest value, against fp64."""
    q, k, v = make_qkv(1, 2048, 2048, 2, 2, 64, seed=seed)
    layout = SlidingWindow(512).layout(2048, block_size=64)
    exact, _ = oracle_attention(q.double(), k.double(), v.double(), layout.to_dense())
    out, _ = cpu.attention_forward(q, k, v, layout, 64**-0.5)
    return float((out - exact).abs().amax() / exact.abs().amax())


# ---- times -----------------------------------------------------------------------------------------------------------


def time_shape(
    workloads: list[Workload], timed_pass: str, seed: int, say: Report, memory: str = "heads first"
) -> list[dict[str, Any]]:
    """Time workloads of one shape, SDPA and the matmul, in turns; SDPA reads the same memory."""
    seqlen, head_dim = workloads[0].seqlen, workloads[0].head_dim
    layouts = {workload.name: workload.layout(seed) for workload in workloads}
    q, k, v = make_qkv(1, seqlen, seqlen, HEADS, HEADS, head_dim, seed=seed)
    if memory == "heads first":
        q, k, v = (_heads_first(x) for x in (q, k, v))
    runs: dict[str, Run] = {name: _sparse_run(q, k, v, layout, timed_pass) for name, layout in layouts.items()}
    runs |= {"sdpa": _dense_run(q, k, v, timed_pass), "gemm": _gemm_run(seed)}
    times = medians(runs, rounds=5 if seqlen <= 4096 else 3)
    flops = (4 if timed_pass == "forward" else 10) * head_dim * HEADS
    gemm_gf = 2e-9 * GEMM**3 / times["gemm"]
    sdpa_gf = 1e-9 * flops * seqlen * (seqlen + 1) / 2 / times["sdpa"]
    shape = f"{timed_pass} {seqlen} x {head_dim} x {HEADS} heads, {memory}"
    say(f"{shape}: matmul {gemm_gf:.0f} GF, causal SDPA {sdpa_gf:.0f} GF")
    rows = []
    for workload in workloads:
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


def time_small(seed: int, say: Report) -> list[dict[str, Any]]:
    """Full density through the public function against SDPA at short lengths."""
    rows = []
    for seqlen in SMALL:
        q, k, v = (_heads_first(x) for x in make_qkv(1, seqlen, seqlen, HEADS, HEADS, 64, seed=seed))
        layout = Full().layout(seqlen, block_size=16 if seqlen < 128 else 64)
        sparse = lambda q=q, k=k, v=v, layout=layout: sparse_attention(q, k, v, layout, backend="cpu")
        repeat = max(2, 2048 // seqlen)
        runs = {"sparse": _repeated(sparse, repeat), "sdpa": _repeated(_dense_run(q, k, v, "forward"), repeat)}
        times = medians(runs, rounds=15)
        row = {"seqlen": seqlen, "us": 1e6 * times["sparse"] / repeat, "sdpa_us": 1e6 * times["sdpa"] / repeat}
        row["times_faster"] = row["sdpa_us"] / row["us"]
        rows.append(row)
        say(f"full density, {seqlen} tokens: {row['us']:.0f} us, SDPA {row['sdpa_us']:.0f} us")
    return rows


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds of each, after a warm-up, one of each per round."""
    clock = _clock(torch.get_num_threads())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
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
    """The same values with the memory of (batch, heads, seqlen, head_dim), as a kv cache has it; shared with SDPA."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _gemm_run(seed: int) -> Run:
    a, b = torch.randn(2, GEMM, GEMM, generator=torch.Generator().manual_seed(seed))
    out = torch.empty(GEMM, GEMM)
    return lambda: torch.mm(a, b, out=out)


def _sparse_run(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, timed_pass: str) -> Run:
    scale = q.shape[-1] ** -0.5
    if timed_pass == "forward":
        return lambda: cpu.attention_forward(q, k, v, layout, scale)
    out, lse = cpu.attention_forward(q, k, v, layout, scale)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return lambda: cpu.attention_backward(do, None, q, k, v, out, lse, layout, scale)


def _dense_run(q: Tensor, k: Tensor, v: Tensor, timed_pass: str) -> Run:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if timed_pass == "forward":
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)


# ---- what is timed, and what it must reach ---------------------------------------------------------------------------


# seqlen, head_dim, pass, memory of q, k, v: of (batch, heads, seqlen, head_dim) as a kv cache has it, or of (batch,
# seqlen, heads, head_dim) as a projection leaves it, where the rows of a head lie apart.
SHAPES = (
    (4096, 64, "forward", "heads first"),
    (4096, 64, "backward", "heads first"),
    (4096, 128, "forward", "heads first"),
    (4096, 128, "backward", "heads first"),
    (8192, 64, "forward", "heads first"),
    (4096, 64, "forward", "tokens first"),
    (4096, 128, "forward", "tokens first"),
)
QUICK_SHAPES = SHAPES[:2]


def _workloads(seqlen: int, head_dim: int) -> list[Workload]:
    windows = [Workload(f"window {w}", seqlen, head_dim, window=w) for w in (256, 512, 1024)]
    blocks = [
        Workload(f"random 10 %, blocks {block}", seqlen, head_dim, density=0.1, block_size=block)
        for block in (32, 64, 128)
    ]
    return [*windows, *blocks, Workload("full density", seqlen, head_dim)]


def bars_of(rows: Iterable[dict[str, Any]]) -> list[Bar]:
    """The bars that each row of `time_shape` must reach; those of memory with tokens first are for information."""
    bars = []
    for row in rows:
        if row["memory"] != "heads first":
            continue
        name, forward = row["workload"], row["pass"] == "forward"
        where = f"{name}, {row['seqlen']} x {row['head_dim']}"
        main = name in ("window 512", "window 1024", "random 10 %, blocks 64")
        if main and forward:
            bars.append(Bar("forward, useful GF of matmul", 0.70, row["of_gemm"], where))
            bars.append(Bar("forward, useful GF of SDPA", 0.90, row["of_sdpa"], where))
        elif main:
            bars.append(Bar("backward, useful GF of matmul", 0.70, row["of_gemm"], where))
        if forward and name in ("window 256", "random 10 %, blocks 32"):
            bars.append(Bar("forward, small windows and blocks, of matmul", 0.60, row["of_gemm"], where))
        if name == "random 10 %, blocks 64":
            bars.append(Bar(f"{row['pass']}, times faster at 10 %", 9.0, row["times_faster"], where))
        if forward and name == "window 512" and row["seqlen"] == 8192:
            bars.append(Bar("forward, times faster at window 512", 8.5, row["times_faster"], where))
        if forward and name == "full density":
            bars.append(Bar("forward, times faster at full density", 1.1, row["times_faster"], where))
    return bars


def bars_of_small(rows: Iterable[dict[str, Any]]) -> list[Bar]:
    """Never slower than dense attention."""
    return [Bar("times faster at any length", 1.0, row["times_faster"], f"{row['seqlen']} tokens") for row in rows]


def bars_of_decode(rows: Iterable[dict[str, Any]]) -> list[Bar]:
    """Pages of 64; those of 16 are for information."""
    return [
        Bar("decode, times faster at 10 %", 9.0, row["times_faster"], f"{row['seqlen']} keys, pages of 64")
        for row in rows
        if row["page_size"] == 64
    ]
