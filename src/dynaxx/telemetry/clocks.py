"""Clocks for what a device does: marks that are set without waiting, and the seconds between two of them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Any, Protocol

import torch

MOST_FREE = 256  # events kept per device


class Clock(Protocol):
    """A mark is whatever the clock says it is."""

    def mark(self) -> Any:
        """Set a mark where the device's queue of work ends now."""

    def ready(self, mark: Any) -> bool:
        """Whether the device has come to the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks that are ready."""

    def release(self, *marks: Any) -> None:
        """Say that nobody asks for these marks again."""


class HostClock:
    """The CPU's own clock, which never goes back."""

    def mark(self) -> float:
        return time.perf_counter()

    def ready(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def release(self, *marks: float) -> None:
        pass


class CudaClock:
    """Events on the stream of one GPU that was current when the clock was made; those released are taken again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free = _FREE[self._stream.device_index]

    def mark(self) -> Any:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def ready(self, mark: Any) -> bool:
        return mark.query()

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3

    def release(self, *marks: Any) -> None:
        self._free.extend(marks)


_FREE: defaultdict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=MOST_FREE))  # events, by device
_HOST = HostClock()


def clock_of(device: torch.device) -> Clock | None:
    """The clock of a device; None where nothing can be measured: another kind of device, a graph being captured."""
    if device.type == "cpu":
        return _HOST
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return CudaClock(device)
