# SPDX-License-Identifier: Apache-2.0
"""Time four calls on a GPU under two checkouts, in turns: what a change of structure must not move.

    git worktree add ../before e8ef3b6
    python benchmarks/kernels/two_commits.py --before ../before/src [--turns 3] [--json FILE]

Each turn is a process of its own that imports dynaxx from one of the checkouts. Times are medians of a turn, and the
table has the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).resolve()
SEQLEN = 32768


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


def measure() -> dict[str, float]:
    """Return milliseconds by call, with the dynaxx that this process imports."""
    import decode
    import nsa

    from dynaxx.lab.bench.gpu_workloads import Workload
    from dynaxx.ops.attention import sparse_attention

    device, found = torch.device("cuda"), {}
    random, window = Workload("random", SEQLEN, density=0.1), Workload("window", SEQLEN, window=1024)
    for name, workload in (("random 10 %", random), ("window of 1,024", window)):
        attend = partial(sparse_attention, layout=workload.layout(device, 0))
        found |= both_passes(name, attend, tuple(workload.inputs(device, 0)))
    found |= both_passes("NSA of 64/4 heads", nsa.attend, tuple(nsa.inputs_of(64, 4, SEQLEN, 0.92)))
    step = decode.run_case(decode.GPU_CASES[1], device, 1.0, alone=True)
    return found | {"decode, 16 sequences of 32,768": next(iter(step["ms"].values()))}


def measure_under(source: Path) -> dict[str, float]:
    """Return the result of `measure` in a process that imports dynaxx from `source`."""
    command = [sys.executable, str(HERE), "--worker"]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(source)}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="`src` of the checkout to compare with")
    parser.add_argument("--turns", type=int, default=3, help="processes per checkout")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this needs a GPU")
    if args.worker:
        print(json.dumps(measure()))
        return
    if args.before is None or not (args.before / "dynaxx").is_dir():
        parser.error("--before must be the `src` folder of another checkout")
    trees = {"before": args.before.resolve(), "after": HERE.parents[2] / "src"}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for turn in range(args.turns):
        for name in list(trees)[:: 1 if turn % 2 == 0 else -1]:
            turns[name].append(measure_under(trees[name]))
            print(name, turns[name][-1], file=sys.stderr)
    rows = [
        {"call": call, **{f"{name}, ms": statistics.median(each[call] for each in turns[name]) for name in trees}}
        for call in turns["after"][0]
    ]
    for each in rows:
        print(f"{each['call']:34}{each['before, ms']:10.4f}{each['after, ms']:10.4f}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
