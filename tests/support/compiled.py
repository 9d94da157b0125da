# SPDX-License-Identifier: Apache-2.0
"""Compile kernels for a GPU that this machine lacks, as the host would launch them, and read what ptxas reports.

Host functions are called on CPU tensors. Where they would start one of the requested kernels, it is compiled instead.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dynaxx.kernels.compat import OPTIONS
from dynaxx.kernels.device import CARDS, Gpu, described_as
from dynaxx.kernels.runtime.launcher import KernelLauncher


@dataclass(frozen=True)
class Compiled:
    """The report of ptxas about a kernel."""

    name: str
    registers: int
    spilled: int  # bytes stored
    shared: int  # bytes of shared memory
    warnings: tuple[str, ...]  # that it runs matrix instructions one at a time, or waits where the kernel does not


class _Alone(Gpu):
    """A GPU whose kernels do not overlap, as in the fingerprints on record."""

    overlaps_launches = False


RECORDED = _Alone(**vars(replace(CARDS["H200"], processors=6)))


class CompilesFor:
    """A driver that answers Triton's questions during compilation for a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.target = GPUTarget("hip", gpu.architecture, 64)
        if gpu.vendor == "nvidia":
            major, minor = gpu.capability
            self.target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_kernels(start: Callable[[], object], names: str, gpu: Gpu = RECORDED) -> list[Compiled]:
    """Compile the kernels that `start` launches and whose names match; skip all others, and compute nothing.

    Args:
        start: calls host functions with CPU tensors, of which nothing is read.
        names: a regular expression.
        gpu: what they are compiled for.
    """
    found: list[Compiled] = []
    known: dict[str, Compiled] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        name = kernel.__name__
        if re.search(names, name):
            patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
            with redirect_stdout(io.StringIO()) as log:
                compiled = kernel.warmup(*arguments, grid=grid, **named)
            if compiled.hash not in known:
                read = read_log if gpu.vendor == "nvidia" else read_assembly
                text = log.getvalue() if gpu.vendor == "nvidia" else compiled.asm["amdgcn"]
                known[compiled.hash] = read(name, text, compiled.metadata.shared)
            found.append(known[compiled.hash])

    with compiling(compile_only, gpu) as patch, knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir, knobs.compilation.always_compile = folder, False  # compiles equal launches once
        knobs.nvidia.dump_ptxas_log = True
        start()
    return found


@contextmanager
def compiling(launch_instead: Callable[..., None], gpu: Gpu = RECORDED) -> Iterator[pytest.MonkeyPatch]:
    """Call `launch_instead(kernel, grid, arguments, named)` instead of launching; let Triton compile for a GPU."""

    def launched(kernel: KernelLauncher, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: launch_instead(kernel.kernel, grid, arguments, {**named, **OPTIONS})

    scopes = knobs.nvidia.scope(), knobs.compilation.scope()
    with pytest.MonkeyPatch.context() as patch, scopes[0], scopes[1], described_as(gpu):
        knobs.compilation.always_compile = True
        patch.setattr(KernelLauncher, "__getitem__", launched)
        patch.setattr(driver, "_active", CompilesFor(gpu))
        yield patch


def read_log(name: str, log: str, shared: int) -> Compiled:
    """Read the log of `ptxas -v`."""
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, f"ptxas does not say what {name} takes:\n{log}"
    assert spilled is not None, log
    warnings = tuple(line for line in log.splitlines() if re.search(r"\(C75\d\d\)", line))
    return Compiled(name, int(registers[1]), int(spilled[1]), shared, warnings)


def read_assembly(name: str, text: str, shared: int) -> Compiled:
    """Read the metadata in the assembly of a kernel for AMD's GPUs; a thread spills 4 bytes of each register."""
    registers, spilled = (int(re.search(rf"\.{key}: +(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count"))
    return Compiled(name, registers, 4 * spilled, shared, ())
