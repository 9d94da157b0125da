# SPDX-License-Identifier: Apache-2.0
"""Time the same calls under several versions of Triton, in turns on one GPU: kernels, and the host's part of a call.

    python benchmarks/triton_versions.py 3.6=/opt/triton-3.6 3.9=/opt/triton-3.9 [--turns 3] [--only NAME ...]

`pip install --no-deps --target FOLDER triton==VERSION` fills a folder; an empty name means the installed Triton. Each
version has a process and a cache of its own. They are asked for one row after another, so that a row of all versions
is timed within a second or two, and the first version is what the others are compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

SUITE = ("random", "window", "density", "group 7", "group 8", "head_dim 64", "softcap random")
PORTABLE = ("random 10 %", "head_dim 64")
HOST = ("forward", "forward for training", "backward")


def rows() -> list[tuple[str, str]]:
    """Return the rows of the table: (backend, workload), and ("host", tokens)."""
    from benchmarks.suites.gpu_workloads import WORKLOADS

    suite = [each.name for each in WORKLOADS if each.name.startswith(SUITE) and each.head_dim < 256]
    backends = [("hopper", name) for name in suite] + [("triton", name) for name in PORTABLE]
    return [*backends, ("host", "512"), ("host", "2048")]


def measure(backend: str, name: str) -> dict[str, float]:
    """Return milliseconds of the forward and the backward, or microseconds of the host until a call returns."""
    from benchmarks.kernels.gpu_beside import host_calls, host_us
    from benchmarks.suites.gpu_workloads import WORKLOADS
    from triton.testing import do_bench

    from dynaxx.ops.attention import sparse_attention

    device = torch.device("cuda")
    if backend == "host":
        return {f"{call}, us": host_us(run, call == "forward") for call, run in host_calls(int(name), device).items()}
    workload = next(each for each in WORKLOADS if each.name == name)
    if (backend, name) not in _ready:
        _ready.clear()
        attend = partial(sparse_attention, layout=workload.layout(device, 0), softcap=workload.softcap, backend=backend)
        leaves = workload.inputs(device, 0)
        out = attend(*leaves)
        _ready[backend, name] = (attend, leaves, out, torch.randn_like(out))
    attend, leaves, out, do = _ready[backend, name]
    timed = partial(do_bench, warmup=20, rep=100, return_mode="median")
    with torch.no_grad():
        forward = timed(lambda: attend(*leaves))
    return {
        "forward, ms": forward,
        "backward, ms": timed(lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)),
    }


_ready: dict[tuple[str, str], Any] = {}


def work() -> None:
    """Answer rows on stdin with figures on stdout."""
    import triton

    with contextlib.redirect_stdout(sys.stderr):
        torch.zeros(1, device="cuda")
    print(json.dumps(triton.__version__), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(*json.loads(line))), flush=True)


class Worker:
    """A process with one version of Triton."""

    def __init__(self, name: str, folder: str) -> None:
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        if folder:
            environment["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        command = [sys.executable, __file__, "--worker"]
        self.name = name
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self.answer()

    def answer(self) -> Any:
        """Wait for the next answer of the process."""
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the process of triton {self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, row: tuple[str, str]) -> None:
        """Ask for a row."""
        assert self._process.stdin is not None, "a pipe"
        print(json.dumps(row), file=self._process.stdin, flush=True)


def table(workers: list[Worker], turns: int, only: list[str]) -> list[dict[str, Any]]:
    """Return a row for each call: the median of the turns of each version, and its ratio to the first version."""
    found = []
    for row in rows():
        if only and not " ".join(row).startswith(tuple(only)):
            continue
        for worker in workers:  # all compile at once
            worker.ask(row)
        for worker in workers:
            worker.answer()
        taken: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for turn in range(turns):
            for worker in workers[:: 1 if turn % 2 == 0 else -1]:
                worker.ask(row)
                taken[worker.name].append(worker.answer())
        for call in taken[workers[0].name][0]:
            medians = {name: statistics.median(each[call] for each in took) for name, took in taken.items()}
            first = medians[workers[0].name]
            line = {"backend": row[0], "row": row[1], "call": call, **medians}
            line |= {f"{name} / {workers[0].name}": medians[name] / first for name in list(medians)[1:]}
            found.append(line)
            print(line, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure in turns and print the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="NAME=FOLDER", help="the first is the one to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="rows that begin so: host, 'hopper group 7'"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: a GPU is needed")
    workers = [Worker(*each.split("=", 1)) for each in args.versions]
    result = {"device": torch.cuda.get_device_name(), "versions": {worker.name: worker.version for worker in workers},
              "torch": torch.__version__, "rows": table(workers, args.turns, args.only)}  # fmt: skip
    text = json.dumps(result, indent=1) + "\n"
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
