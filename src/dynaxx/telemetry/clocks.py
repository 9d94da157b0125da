# SPDX-License-Identifier: Apache-2.0
"""Time the work of a device: set marks without waiting, and read the seconds between two marks later."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Any, Protocol

import torch

MAX_FREE = 256  # events kept per device


class Clock(Protocol):
    """Set marks in a device's queue of work. A mark is opaque to the caller."""

    def mark(self) -> Any:
        """Return a mark at the end of the device's queue of work."""

    def ready(self, mark: Any) -> bool:
        """Return whether the device has reached the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that are ready."""

    def release(self, *marks: Any) -> None:
        """Return marks that are no longer needed."""


class HostClock:
    """The CPU's monotonic clock."""

    def mark(self) -> float:
        """Return a mark. See `Clock`."""
        return time.perf_counter()

    def ready(self, mark: float) -> bool:
        """Return whether a mark is reached. See `Clock`."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks. See `Clock`."""
        return end - start

    def release(self, *marks: float) -> None:
        """Return marks. See `Clock`."""
        pass


class CudaClock:
    """CUDA events on the stream that was current when the clock was created. Released events are reused."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free = _FREE[self._stream.device_index]

    def mark(self) -> Any:
        """Return a mark. See `Clock`."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def ready(self, mark: Any) -> bool:
        """Return whether a mark is reached. See `Clock`."""
        return mark.query()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. See `Clock`."""
        return start.elapsed_time(end) / 1e3

    def release(self, *marks: Any) -> None:
        """Return marks. See `Clock`."""
        self._free.extend(marks)


_FREE: defaultdict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=MAX_FREE))  # events, by device
_HOST = HostClock()


def clock_of(device: torch.device) -> Clock | None:
    """Return the clock of a device, or None for other kinds of devices and during the capture of a CUDA graph."""
    if device.type == "cpu":
        return _HOST
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return CudaClock(device)
