# SPDX-License-Identifier: Apache-2.0
"""The machine of a measurement: its hardware, its software versions, and its peak rates."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dynaxx.core.build import processors
from dynaxx.lab.results import Result

VERSIONS_OF = ("dynaxx", "torch", "triton", "transformers", "gguf", "numpy", "pydantic", "vllm")


def need_gpu(device: str = "cuda") -> None:
    """Exit the program if it needs a GPU and torch sees none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"error: this needs a GPU that torch can use; torch {torch.__version__} sees none")


@dataclass(frozen=True)
class Machine(Result):
    """Facts about the machine, which are stored with every measurement."""

    system: str
    cpu: str
    cpu_capability: str  # the widest vectors that torch uses: "AVX2", "AVX512", "NEON"
    cores: int  # cores that this process may use
    threads: int  # threads that torch uses
    memory_gib: float
    gpus: tuple[str, ...]
    python: str
    versions: dict[str, str]  # installed versions by distribution


@dataclass(frozen=True)
class Ceilings(Result):
    """Measured peak rates of the machine, the ceilings for achieved rates."""

    gemm_gflops: float  # rate of a large matrix product
    copy_gbs: float  # rate of a copy far larger than the caches, bytes read and written
    dtype: str
    device: str
    threads: int

    def best_of(self, other: Ceilings) -> Ceilings:
        """Return the higher of two measurements, since disturbances only lower them."""
        gemm, copy = max(self.gemm_gflops, other.gemm_gflops), max(self.copy_gbs, other.copy_gbs)
        return replace(self, gemm_gflops=gemm, copy_gbs=copy)


def machine_facts() -> Machine:
    """Return the facts of this machine."""
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cores=processors(),
        threads=torch.get_num_threads(),
        memory_gib=round(_memory_bytes() / 2**30, 1),
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        python=platform.python_version(),
        versions={name: version for name in VERSIONS_OF if (version := _version(name) or _version(f"{name}-cpu"))},
    )


def load_average() -> float | None:
    """Return the mean number of runnable processes over the last minute, or None if the system does not report it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def measure_ceilings(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, seconds: float = 1.0
) -> Ceilings:
    """Measure the peak rates of a device, in about `seconds` per rate.

    The matrix product grows until one run takes a tenth of a second, so that slow dtypes (bf16 on a CPU without
    AVX-512) are measured quickly as well.
    """
    device = torch.device(device)
    size = 256
    while True:
        a = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        if _best_seconds(partial(torch.mm, a, a), device, 0.0) > 0.1 or size >= 8192:
            break
        size *= 2
    gemm = 2 * size**3 / _best_seconds(partial(torch.mm, a, a), device, seconds) / 1e9
    source = torch.ones(64 * 2**20 if device.type == "cpu" else 512 * 2**20, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    copy = copied / _best_seconds(partial(target.copy_, source), device, seconds) / 1e9
    return Ceilings(gemm, copy, str(dtype).removeprefix("torch."), str(device), torch.get_num_threads())


def synchronize(device: torch.device | str) -> None:
    """Wait until a GPU has finished its work. Does nothing on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _best_seconds(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest of at least two runs, after a warm-up run."""
    run()
    best, started, runs = float("inf"), time.perf_counter(), 0
    while runs < 2 or time.perf_counter() - started < seconds:
        synchronize(device)
        before = time.perf_counter()
        run()
        synchronize(device)
        best, runs = min(best, time.perf_counter() - before), runs + 1
    return best


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


BUSY = 0.25  # cores beyond the idle ones that others must use to disturb


def watch_others() -> Callable[[], bool]:
    """Watch the cores of this process from now on; return a function that says whether others took some since.

    It returns False where the system does not tell.
    """
    began, before, own = time.perf_counter(), _used_seconds(), time.process_time()

    def disturbed() -> bool:
        after, seconds = _used_seconds(), time.perf_counter() - began
        if before is None or after is None or seconds <= 0:
            return False
        others = (after - before - (time.process_time() - own)) / seconds
        return others > max(0, len(_cores()) - torch.get_num_threads()) + BUSY

    return disturbed


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _used_seconds() -> float | None:
    """Return the seconds that anything, also another machine on the same hardware, used our cores since the start."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        names, ticks = {f"cpu{core}" for core in _cores()}, os.sysconf("SC_CLK_TCK")
        rows = [line.split() for line in lines if line.split(" ", 1)[0] in names]
        return sum(sum(map(int, row[1:4] + row[6:9])) for row in rows) / ticks  # without idle and waiting for disks
    except (OSError, ValueError, IndexError):
        return None
