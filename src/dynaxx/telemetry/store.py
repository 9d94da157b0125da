# SPDX-License-Identifier: Apache-2.0
"""The numbers behind a recorder: series by metric and label values under one lock, and the sinks to notify."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from typing import Any, Protocol

from dynaxx.printable import printable
from dynaxx.telemetry.catalog import CATALOG, Metric

MOST_SERIES = 1024  # per metric; a label value that never repeats must not eat the memory
OTHER = "other"
RECENT_EVENTS = 64
EVENT_SPACING = 10.0  # seconds between two log lines of one event

logger = logging.getLogger("dynaxx")


class Series:
    """One metric under one set of label values."""

    __slots__ = ("counts", "labels", "metric", "sum", "value")

    def __init__(self, metric: Metric, labels: tuple[str, ...]) -> None:
        self.metric = metric
        self.labels = labels  # values, in the order of `metric.all_labels`
        self.value = 0.0
        self.counts = [0] * (len(metric.buckets) + 1)  # per bucket, not cumulative; the last is beyond all bounds
        self.sum = 0.0


class Sink(Protocol):
    """Receives every update at once, for exporters that keep numbers of their own."""

    def update(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Add a counter's `value`, set a gauge to it, or observe it in a histogram."""


class Source(Protocol):
    """Holds measurements under way, to flush before numbers are read."""

    def flush(self) -> None:
        """Record what is ready."""


class Store:
    """The numbers themselves, shared by all views of a recorder."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.lock = threading.Lock()
        self.sinks: tuple[Sink, ...] = ()
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self.events: deque[Any] = deque(maxlen=RECENT_EVENTS)
        self.started = time.monotonic()
        self._by_name: dict[str, dict[tuple[str, ...], Series]] = {}
        self._logged: set[str] = set()
        self._lines: dict[str, tuple[float, int]] = {}  # by event: when it was last logged, how many came since

    def unlogged(self, event: str) -> int | None:
        """Return how many of this event were not logged since the last line; None if this one must not be, either."""
        now = time.monotonic()
        with self.lock:
            last, unlogged = self._lines.get(event, (now - EVENT_SPACING, 0))
            due = now - last >= EVENT_SPACING
            self._lines[event] = (now, 0) if due else (last, unlogged + 1)
        return unlogged if due else None

    def series(self, metric: Metric, labels: tuple[str, ...]) -> Series:
        """Return a series, made if new; the series OTHER once there are too many."""
        with self.lock:
            known = self._by_name.setdefault(metric.name, {})
            if labels not in known and len(known) >= MOST_SERIES:
                labels = (OTHER,) * len(labels)  # base labels, too: models may come and go without end
            return known.setdefault(labels, Series(metric, labels))

    def restart(self) -> None:
        """Reset everything to zero under a new lock; views stay valid."""
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.events.clear()
        self._logged.clear()
        self._lines.clear()
        for series in [s for known in self._by_name.values() for s in known.values()]:
            series.value = series.sum = 0.0
            series.counts = [0] * len(series.counts)

    def forget(self, name: str, base: tuple[str, ...], kept: Series | None) -> None:
        """Set other series of an info with these base labels to 0, which means that they are no longer true."""
        if kept is None:
            return
        with self.lock:
            old = [s for s in self._by_name[name].values() if s is not kept and s.labels[:2] == base and s.value]
            for series in old:
                series.value = 0.0
        for series in old:
            for sink in self.sinks:
                self.forward(sink, series, 0.0)

    def copy(self) -> list[Series]:
        """Return copies of all series that are in force."""
        copies = []
        with self.lock:
            for series in [s for known in self._by_name.values() for s in known.values()]:
                if series.metric.kind == "info" and not series.value:  # no longer in force
                    continue
                copy = Series(series.metric, series.labels)
                copy.value, copy.sum, copy.counts = series.value, series.sum, list(series.counts)
                copies.append(copy)
        return copies

    def forward(self, sink: Sink, series: Series, value: float) -> None:
        """Send an update to a sink; count an error in it."""
        try:
            sink.update(series.metric, series.labels, value)
        except Exception as error:
            self.failed("sink", error)

    def complain(self, message: str) -> None:
        """Raise a ValueError where the store is strict; else count wrong use."""
        if self.strict:
            raise ValueError(message)
        self.failed("wrong use", message)

    def failed(self, what: str, error: BaseException | str) -> None:
        """Count something that telemetry could not do, and log it once per kind."""
        metric = CATALOG["dynaxx_telemetry_errors_total"]
        series = self.series(metric, ("", "0", what))
        with self.lock:
            series.value += 1
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(
                "telemetry: %s: %s (said once; dynaxx_telemetry_errors_total counts)", what, printable(error, most=500)
            )
