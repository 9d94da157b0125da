# SPDX-License-Identifier: Apache-2.0
"""Watch a process from a background thread, so that a source that hangs does not hold up whoever shows it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from dynaxx.telemetry.overview import Overview, Watch, concerns_of

LATE = 3  # intervals after which a reading that has not come to an end is called late
LATE_SECONDS = 10.0  # at least


class BackgroundWatch:
    """Looks every `interval` seconds until `close()`; `latest` always answers at once.

    Raises:
        ValueError, OSError, ImportError: the first look fails, as `Watch.look`.
    """

    def __init__(self, watch: Watch, interval: float) -> None:
        self._watch, self._interval = watch, interval
        self._seen = watch.look()
        self._began = time.monotonic()  # of the last look
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynaxx watch", daemon=True)
        self._thread.start()

    @property
    def history(self) -> list[dict[str, float | None]]:
        """The numbers of earlier looks, oldest first."""
        return list(self._watch.history)

    def latest(self) -> Overview:
        """Return the last overview; where the source has not answered for long, with its age as the worst concern."""
        seen, age = self._seen, time.monotonic() - self._began
        if age <= max(LATE * self._interval, LATE_SECONDS):
            return seen
        late = replace(seen, age_seconds=age)
        return replace(late, concerns=concerns_of(late))

    def close(self) -> None:
        """Stop looking; a look that hangs is not waited for."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            seen = self._watch.look()
            self._seen, self._began = seen, time.monotonic()
