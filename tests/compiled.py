# SPDX-License-Identifier: Apache-2.0
"""Compile kernels for a GPU that this machine lacks, as the host would launch them, and read what ptxas reports.

Host functions are called on CPU tensors. Where they would start one of the requested kernels, it is compiled instead.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dynaxx.kernels.gpu.runtime import arguments as launch
from dynaxx.kernels.gpu.runtime.launcher import KernelLauncher
from dynaxx.kernels.triton.attention import config

SHARED_MEMORY = 232448  # bytes that a program may use on an H100 or H200


@dataclass(frozen=True)
class Compiled:
    """The report of ptxas about a kernel."""

    name: str
    registers: int
    spilled: int  # bytes stored
    shared: int  # bytes of shared memory
    warnings: tuple[str, ...]  # that it runs matrix instructions one at a time, or waits where the kernel does not


class _Hopper:
    """A driver that answers Triton's questions during compilation."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_kernels(start: Callable[[], object], names: str, capfd: pytest.CaptureFixture[str]) -> list[Compiled]:
    """Compile the kernels that `start` launches and whose names match; skip all others, and compute nothing.

    Args:
        start: calls host functions with CPU tensors, of which nothing is read.
        names: a regular expression.
    """
    found: list[Compiled] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        name = kernel.__name__
        if re.search(names, name):
            capfd.readouterr()
            patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
            compiled = kernel.warmup(*arguments, grid=grid, **named)
            found.append(read_log(name, capfd.readouterr().out, compiled.metadata.shared))

    with compiling(compile_only) as patch:
        knobs.nvidia.dump_ptxas_log = True
        start()
    return found


@contextmanager
def compiling(launch_instead: Callable[..., None]) -> Iterator[pytest.MonkeyPatch]:
    """Call `launch_instead(kernel, grid, arguments, named)` instead of launching; let Triton compile for an H100."""

    def launched(kernel: KernelLauncher, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: launch_instead(kernel.kernel, grid, arguments, named)

    tiles = (config.forward_tiles, config.backward_dq_tiles, config.backward_dkv_tiles, config.backward_dv_tiles)
    with pytest.MonkeyPatch.context() as patch, knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.compilation.always_compile = True
        patch.setattr(config, "shared_memory", lambda device: SHARED_MEMORY)
        patch.setattr(launch, "interpreted", lambda: True)  # so that tiles come by TMA, on CPU tensors
        patch.setattr(KernelLauncher, "__getitem__", launched)
        for choose in tiles:
            choose.cache_clear()
        patch.setattr(driver, "_active", _Hopper())
        try:
            yield patch
        finally:
            for choose in tiles:
                choose.cache_clear()


def read_log(name: str, log: str, shared: int) -> Compiled:
    """Read the log of `ptxas -v`."""
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, f"ptxas does not say what {name} takes:\n{log}"
    assert spilled is not None, log
    warnings = tuple(line for line in log.splitlines() if re.search(r"\(C75\d\d\)", line))
    return Compiled(name, int(registers[1]), int(spilled[1]), shared, warnings)
