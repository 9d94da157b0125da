# SPDX-License-Identifier: Apache-2.0
"""The statistics file of a running process: written again and again, whole each time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from dynaxx.policy import Profile, save_profile
from dynaxx.telemetry import Recorder


class StatisticsFile:
    """Writes what `statistics` returns every `interval` seconds, from a daemon thread, and once more when it stops.

    Args:
        statistics: a method, held weakly: when its object is gone, the thread ends.
        numbers: where a file that cannot be written is counted; the next interval tries again.
    """

    def __init__(
        self, path: str | os.PathLike[str], statistics: Callable[[], Profile | None], numbers: Recorder, interval: float
    ) -> None:
        if not interval > 0:
            raise ValueError(f"`interval` must be > 0 seconds, got {interval}")
        self.path = os.fspath(path)
        self._statistics = weakref.WeakMethod(statistics)
        self._numbers = numbers
        self._stopped = threading.Event()
        self._said = False
        threading.Thread(target=_write_on, args=(weakref.ref(self), self._stopped, interval), daemon=True).start()

    def write(self) -> bool:
        """Write now; whether there was anything and it could be written. Never raises."""
        statistics = self._statistics()
        try:
            profile = None if statistics is None else statistics()
            if profile is None:
                return False
            save_profile(profile, self.path)
        except Exception as error:
            self._numbers.failed("statistics file", error)
            if not self._said:
                self._said = True
                self._numbers.event("telemetry_failed", what="statistics file")
            return False
        self._said = False
        return True

    def stop(self) -> None:
        """Write a last time, and no more."""
        if not self._stopped.is_set():
            self._stopped.set()
            self.write()


def _write_on(file: weakref.ref[StatisticsFile], stopped: threading.Event, interval: float) -> None:
    while not stopped.wait(interval):
        alive = file()
        if alive is None:
            return
        alive.write()
        del alive
