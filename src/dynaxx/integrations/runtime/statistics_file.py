# SPDX-License-Identifier: Apache-2.0
"""The statistics file of a running process, which is rewritten regularly and always whole."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from dynaxx.forks import in_child, new_event
from dynaxx.policy import Profile, save_profile
from dynaxx.telemetry import Recorder


class StatisticsFile:
    """Write the result of `statistics` every `interval` seconds in a daemon thread, and once more when it stops.

    Args:
        path: the file.
        statistics: a method, which is referenced weakly; the thread ends when its object is collected.
        numbers: the recorder, which counts failed writes; the next interval tries again.
        interval: seconds between two writes.
    """

    def __init__(
        self, path: str | os.PathLike[str], statistics: Callable[[], Profile | None], numbers: Recorder, interval: float
    ) -> None:
        if not interval > 0:
            raise ValueError(f"`interval` must be > 0 seconds, got {interval}")
        self.path = os.fspath(path)
        self._statistics = weakref.WeakMethod(statistics)
        self._numbers = numbers
        self._stopped = new_event()
        in_child(self, lambda file: file._stopped.set())  # the file is the parent's
        self._logged = False
        threading.Thread(target=_write_on, args=(weakref.ref(self), self._stopped, interval), daemon=True).start()

    def write(self) -> bool:
        """Write now. Return whether there was something to write and the write succeeded. Never raises."""
        statistics = self._statistics()
        try:
            profile = None if statistics is None else statistics()
            if profile is None:
                return False
            save_profile(profile, self.path)
        except Exception as error:
            self._numbers.failed("statistics file", error)
            if not self._logged:
                self._logged = True
                self._numbers.event("telemetry_failed", what="statistics file")
            return False
        self._logged = False
        return True

    def stop(self) -> None:
        """Write a last time, and stop the thread."""
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
