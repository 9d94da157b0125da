# SPDX-License-Identifier: Apache-2.0
"""Measure how many cores other processes use while something is timed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

BUSY = 0.25  # cores used by others, beyond the idle ones, from which times are disturbed


class LoadWatch:
    """Watch the work of other processes from now on."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.perf_counter(), _used_seconds(), time.process_time()

    def others(self) -> float | None:
        """Return the mean number of cores that other processes used so far, or None if the system does not tell.

        Only the cores that this process may use are counted.
        """
        used, seconds = _used_seconds(), time.perf_counter() - self._wall
        if used is None or self._all is None or seconds <= 0:
            return None
        return round(max(0.0, used - self._all - (time.process_time() - self._own)) / seconds, 2)


def is_busy(others: float | None, *, threads: int | None = None, cores: int | None = None) -> bool:
    """Return whether other processes took cores that this one wanted.

    Args:
        others: cores that they used; None counts as a quiet machine.
        threads: threads of this process; by default torch's.
        cores: cores that it may use; by default those of its affinity.
    """
    threads, cores = threads or torch.get_num_threads(), cores or len(_cores())
    return others is not None and others > max(0, cores - threads) + BUSY


def busy_note(others: float | None) -> str:
    """Return the sentence that every result with a time carries if the machine was busy, else an empty string."""
    return (
        f"The machine was busy: other processes used {others:.1f} of {len(_cores())} cores." if is_busy(others) else ""
    )


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
