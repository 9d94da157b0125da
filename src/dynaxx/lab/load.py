# SPDX-License-Identifier: Apache-2.0
"""Notice other processes that disturb what is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

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
