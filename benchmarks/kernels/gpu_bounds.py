# SPDX-License-Identifier: Apache-2.0
"""Measure what bounds attention on a GPU: its kernels, power and clock, beside a peer over the same blocks.

    python benchmarks/kernels/gpu_bounds.py --below 1.05 --json bounds.json

Of the suite's random sample, problems whose ratio in the record is below `--below` are run alone for a second, ours and
the peer's in turns. A row has milliseconds, watts, MHz while it ran, and the share of the tensor cores' rate at that
clock which useful FLOPs take: 4,096 per cycle of a multiprocessor. Kernels' times are the
profiler's; "L2, TB/s" is a read of 16 MiB again and again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.suites.gpu_peers import PEERS
from benchmarks.suites.gpu_workloads import Workload, sampled_workloads

from dynaxx.ops.attention import sparse_attention

RECORD = Path(__file__).parents[1] / "results" / "attention_sample.json"
SECONDS = 2.0  # of each sustained run; NVML averages power over one
PER_CYCLE = 4096  # bf16 FLOPs of one of Hopper's multiprocessors


class Meter:
    """Watts and MHz of a GPU while a run goes on, by NVML."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.nvml.nvmlInit_v2()
        self.card = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        if self.nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.card)):
            raise SystemExit("NVML does not know the GPU")

    def read(self) -> tuple[float, float]:
        """Return (watts, MHz of the multiprocessors) now."""
        power, clock = ctypes.c_uint(), ctypes.c_uint()
        self.nvml.nvmlDeviceGetPowerUsage(self.card, ctypes.byref(power))
        self.nvml.nvmlDeviceGetClockInfo(self.card, 1, ctypes.byref(clock))
        return power.value / 1000, float(clock.value)

    def sustained(self, call: Callable[[], object]) -> dict[str, float]:
        """Run a call for `SECONDS`; return its ms, and the medians of watts and MHz of the second half."""
        call()
        torch.cuda.synchronize()
        found: list[tuple[float, float]] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.02):
                found.append(self.read())

        thread = threading.Thread(target=watch)
        thread.start()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        calls, until = 0, time.monotonic() + SECONDS
        first.record()
        while time.monotonic() < until:
            for _ in range(10):
                call()
            calls += 10
            torch.cuda.synchronize()
        last.record()
        torch.cuda.synchronize()
        stop.set()
        thread.join()
        half = found[len(found) // 2 :]
        watts, clocks = zip(*half, strict=True)
        return {
            "ms": first.elapsed_time(last) / calls,
            "watts": statistics.median(watts),
            "mhz": statistics.median(clocks),
        }


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Return microseconds of each kernel of a call that takes at least 2 % of it."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    times = {each.key: each.self_device_time_total / 5 for each in profile.key_averages()}
    return {key[:80]: round(us, 1) for key, us in times.items() if us > 0.02 * sum(times.values())}


@triton.jit
def _read(data, out, rounds, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    places = tl.arange(0, BLOCK)
    count = tl.num_programs(0)
    for at in range(rounds):
        first = ((tl.program_id(0) + at) % count).to(tl.int64) * BLOCK
        total += tl.load(data + first + places, cache_modifier=".cg")
    tl.store(out + tl.program_id(0).to(tl.int64) * BLOCK + places, total)


def l2_bandwidth() -> float:
    """Return TB/s at which all multiprocessors read 16 MiB from L2."""
    block, count, rounds = 4096, 1024, 256
    data = torch.zeros(block * count, device="cuda", dtype=torch.float32)
    out = torch.empty_like(data)
    call = lambda: _read[(count,)](data, out, rounds, block, num_warps=8)
    ms: float = triton.testing.do_bench(call, rep=50, return_mode="median")
    return block * count * 4 * rounds / ms / 1e9


def passes(run: Callable[..., torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Return the calls of the forward and of the backward."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run(*leaves)

    out = run(*leaves)
    do = torch.randn_like(out)
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)}


def selected(below: float, seed: int) -> list[tuple[Workload, str]]:
    """Return the problems of the recorded sample below a ratio, each with its peer."""
    rows = json.loads(RECORD.read_text())["rows"]
    found = []
    for workload, (_, _, _, ratios) in zip(sampled_workloads(len(rows), seed), rows, strict=True):
        numbers = [float(each) for each in re.findall(r"\d+\.\d+", ratios)]
        if numbers and min(numbers) < below:
            found.append((workload, "fa4" if "FA4" in ratios else "cudnn bsa"))
    return found


def main() -> None:
    """Print a row per problem, pass and implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--below", type=float, default=1.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no problem begins")
    parser.add_argument("--json", type=Path, default=Path("bounds.json"))
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    device, meter = torch.device("cuda", 0), Meter()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "l2": l2_bandwidth(), "rows": []}
    print(f"L2, TB/s: {document['l2']:.2f}", flush=True)
    for workload, peer in selected(args.below, args.seed):
        if time.monotonic() > until:
            break
        layout, leaves = workload.layout(device, args.seed), workload.inputs(device, args.seed)
        flops = workload.flops(layout)
        runs = {"dynaxx": partial(sparse_attention, layout=layout)}
        try:
            runs[peer] = PEERS[peer](workload, layout)
        except Exception as error:
            print(f"{peer}: {error}")
        for name, run in runs.items():
            for kind, call in passes(run, leaves).items():
                row = {"problem": workload.name, "implementation": name, "pass": kind, **meter.sustained(call)}
                row["tflops"] = flops * (1 if kind == "forward" else 2.5) / row["ms"] / 1e9
                row["of_tensor_cores"] = row["tflops"] * 1e6 / (processors * PER_CYCLE * row["mhz"])
                row["kernels"] = kernels(call)
                document["rows"].append(row)
                print(json.dumps(row), flush=True)
                args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
