# SPDX-License-Identifier: Apache-2.0
"""Watch a process from a background thread, so that a hanging source does not block the display."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from dynaxx.forks import new_event
from dynaxx.telemetry.overview import Overview, Watch, concerns_of

LATE = 3  # intervals after which an unfinished reading counts as late
LATE_SECONDS = 10.0  # smallest such delay


class BackgroundWatch:
    """Read every `interval` seconds until `close()`. `latest` always returns at once.

    Raises:
        ValueError: the first reading fails, see `Watch.look`.
        OSError: the first reading fails, see `Watch.look`.
        ImportError: the first reading fails, see `Watch.look`.
    """

    def __init__(self, watch: Watch, interval: float) -> None:
        self._watch, self._interval = watch, interval
        self._seen = watch.look()
        self._began = time.monotonic()  # start of the last reading
        self._closed = new_event()
        self._thread = threading.Thread(target=self._run, name="dynaxx watch", daemon=True)
        self._thread.start()

    @property
    def history(self) -> list[dict[str, float | None]]:
        """The numbers of earlier readings, oldest first."""
        return list(self._watch.history)

    def latest(self) -> Overview:
        """Return the last overview. If the source has not answered for long, its age is the worst concern."""
        seen, age = self._seen, time.monotonic() - self._began
        if age <= max(LATE * self._interval, LATE_SECONDS):
            return seen
        late = replace(seen, age_seconds=age)
        return replace(late, concerns=concerns_of(late))

    def close(self) -> None:
        """Stop reading, without waiting for a reading that hangs."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            seen = self._watch.look()
            self._seen, self._began = seen, time.monotonic()
