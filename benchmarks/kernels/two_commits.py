# SPDX-License-Identifier: Apache-2.0
"""Time the same calls under two checkouts, in turns: a change of structure must not make them slower.

    git worktree add ../before e8ef3b6
    python benchmarks/kernels/two_commits.py --before ../before/src [--turns 3] [--json FILE]
    python benchmarks/kernels/two_commits.py --before ../before/src --suite cpu [--only "window,decode"]

Each turn is a process of its own that imports dynaxx from one of the checkouts. Times are medians of a turn, and the
table has the median of the turns. The GPU suite is four calls. The CPU suite is
`python -m benchmarks.suites cpu --threads 1`, whose rows also say how many times faster they are than torch's SDPA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
SEQLEN = 32768
DRIFT = 0.92  # of a query towards the next one

Figures = dict[str, dict[str, float]]  # call: "ms", and "x SDPA" where the benchmark times SDPA as well


def timed(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call."""
    from triton.testing import do_bench

    found: float = do_bench(call, warmup=30, rep=150, return_mode="median")
    return found


def both_passes(name: str, attend: Callable[..., torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return milliseconds of the forward and of the backward."""
    with torch.no_grad():
        forward = timed(lambda: attend(*leaves))
    out = attend(*leaves)
    do = torch.randn_like(out)
    backward = timed(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))
    return {f"{name}, forward": forward, f"{name}, backward": backward}


def nsa_call() -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return native sparse attention of 64 q heads and 4 kv heads at the paper's sizes, and its q, k, v and gates.

    Queries drift slowly, so that neighbours choose alike. Only names that both checkouts have are used.
    """
    import dynaxx as dx

    sizes = (getattr(dx, "NsaSizes", None) or dx.NativeSizes)()  # the second is its name before 0.2.0
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, heads, 128, device="cuda") for heads in (64, 4, 4))
    steps = torch.arange(1024, device="cuda")
    decay = (DRIFT ** (steps[:, None] - steps)).tril() * (1 - DRIFT**2) ** 0.5
    q = torch.einsum("st,bnthd->bnshd", decay, q.unflatten(1, (-1, 1024))).flatten(1, 2)
    gates = torch.rand(1, SEQLEN, 64, 3, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        compressed = (dx.trained.compress(k, sizes), dx.trained.compress(v, sizes))
        return dx.trained.native_sparse_attention(q, k, v, compressed, gates, sizes)

    return attend, tuple(x.bfloat16().requires_grad_() for x in (q, k, v, gates))


def measure_gpu() -> Figures:
    """Return the GPU suite's figures, with the dynaxx that this process imports."""
    sys.path.insert(0, str(ROOT))
    import decode
    from benchmarks.suites.gpu_workloads import Workload

    from dynaxx.ops.attention import sparse_attention

    device, found = torch.device("cuda"), {}
    random, window = Workload("random", SEQLEN, density=0.1), Workload("window", SEQLEN, window=1024)
    for name, workload in (("random 10 %", random), ("window of 1,024", window)):
        attend = partial(sparse_attention, layout=workload.layout(device, 0))
        found |= both_passes(name, attend, tuple(workload.inputs(device, 0)))
    found |= both_passes("NSA of 64/4 heads", *nsa_call())
    step = decode.run_case(decode.GPU_CASES[1], device, 1.0, alone=True)
    found["decode, 16 sequences of 32,768"] = next(iter(step["ms"].values()))
    return {call: {"ms": ms} for call, ms in found.items()}


def figures_of(suite: dict[str, Any]) -> Figures:
    """Return the figures in the JSON of `python -m benchmarks.suites cpu`."""
    found: Figures = {}
    for row in suite["rows"]:
        order = "" if row["memory"] == "heads first" else f", {row['memory']}"
        call = f"{row['workload']}, {row['pass']}, {row['seqlen']:,} x {row['head_dim']}{order}"
        found[call] = {"ms": row["ms"], "x SDPA": row["times_faster"]}
    for row in suite["small"]:
        found[f"full density, {row['seqlen']} tokens"] = {"ms": row["us"] / 1e3, "x SDPA": row["times_faster"]}
    for row in suite["half"]:
        found[f"window 512, {row['pass']}, {row['dtype']}, head_dim {row['head_dim']}"] = {"ms": row["ms"]}
    for row in suite["decode"]:
        found[f"decode, pages of {row['page_size']}"] = {"ms": row["ms"], "x SDPA": row["times_faster"]}
    return found


def measure_under(source: Path, args: argparse.Namespace) -> Figures:
    """Return the suite's figures from a process that imports dynaxx from `source`."""
    command = [sys.executable, str(HERE), "--worker"]
    if args.suite == "cpu":
        command = [sys.executable, "-m", "benchmarks.suites", "cpu", "--threads", "1", "--json", "--quiet"]
        command += ["--only", args.only] if args.only else []
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    run = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if run.returncode not in (0, 1):  # 1: a figure misses its target
        raise SystemExit(f"error: the process under {source} ended with {run.returncode}")
    found: dict[str, Any] = json.loads(run.stdout if args.suite == "cpu" else run.stdout.splitlines()[-1])
    return figures_of(found) if args.suite == "cpu" else found


def row_of(call: str, turns: dict[str, list[Figures]]) -> dict[str, Any]:
    """Return a row of the table: the median of the turns of each checkout."""
    middle = {
        (tree, figure): statistics.median(turn[call][figure] for turn in turns[tree])
        for figure in turns["after"][0][call]
        for tree in turns
    }
    row: dict[str, Any] = {"call": call} | {f"{tree}, {figure}": value for (tree, figure), value in middle.items()}
    return row | {"after / before": middle["after", "ms"] / middle["before", "ms"]}


def kind_of(call: str) -> str:
    """Return the kind of a call: its name without sizes, and its pass if it has one."""
    timed = next((f", {each}" for each in ("forward", "backward") if each in call), "")
    half = ", half precision" if "float16" in call else ""
    short = "short sequences, " if call.endswith("tokens") else ""
    name = re.sub(r"\s*\d.*", "", call.split(",")[0])
    return f"{short}{name}{timed}{half}"


def kinds_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize rows by kind: their number, and the geometric mean and the range of the ratios."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(kind_of(row["call"]), []).append(row["after / before"])
    ratios["all"] = [row["after / before"] for row in rows]
    return [
        {"calls": kind, "number": len(found), "after / before": statistics.geometric_mean(found),
         "least": min(found), "largest": max(found)}
        for kind, found in ratios.items()
    ]  # fmt: skip


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="`src` of the checkout to compare with")
    parser.add_argument("--after", type=Path, default=HERE.parents[2] / "src", help="`src` of the newer checkout")
    parser.add_argument("--suite", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", default="", help="cpu: rows whose name starts with one of these")
    parser.add_argument("--turns", type=int, default=3, help="processes per checkout")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.suite == "gpu" and not torch.cuda.is_available():
        raise SystemExit("error: the GPU suite needs a GPU")
    if args.worker:
        print(json.dumps(measure_gpu()))
        return
    if args.before is None or not (args.before / "dynaxx").is_dir():
        parser.error("--before must be the `src` folder of another checkout")
    trees = {"before": args.before.resolve(), "after": args.after.resolve()}
    turns: dict[str, list[Figures]] = {name: [] for name in trees}
    for turn in range(args.turns):
        for name in list(trees)[:: 1 if turn % 2 == 0 else -1]:
            turns[name].append(measure_under(trees[name], args))
            print(name, turns[name][-1], file=sys.stderr)
    rows = [row_of(call, turns) for call in turns["after"][0]]
    for each in rows:
        print(f"{each['call']:58}{each['before, ms']:10.4f}{each['after, ms']:10.4f}{each['after / before']:8.3f}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "kinds": kinds_of(rows)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
