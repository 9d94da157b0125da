# SPDX-License-Identifier: Apache-2.0
"""The numbers behind a recorder: series by metric and label values under one lock, and the sinks to notify."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from typing import Any, Protocol

from dynaxx.forks import in_child, new_lock
from dynaxx.printable import printable
from dynaxx.telemetry.catalog import CATALOG, Metric

MAX_SERIES = 1024  # per metric, so that label values that never repeat cannot exhaust the memory
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
    """Receive every update at once. For exporters that store the numbers themselves."""

    def update(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Add a counter's `value`, set a gauge to it, or observe it in a histogram."""


class Source(Protocol):
    """Hold pending measurements, which are flushed before metrics are read."""

    def flush(self) -> None:
        """Record the measurements that are ready."""


class Store:
    """The numbers that all views of a recorder share."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.lock = new_lock()
        self.sinks: tuple[Sink, ...] = ()
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self.events: deque[Any] = deque(maxlen=RECENT_EVENTS)
        self.started = time.monotonic()
        self._by_name: dict[str, dict[tuple[str, ...], Series]] = {}
        self._logged: set[str] = set()
        self._lines: dict[str, tuple[float, int]] = {}  # time of the last log line, events since
        in_child(self, Store.restart)  # the parent keeps its counts

    def unlogged(self, event: str) -> int | None:
        """Return the number of unlogged events since the last line, or None if this event must not be logged."""
        now = time.monotonic()
        with self.lock:
            last, unlogged = self._lines.get(event, (now - EVENT_SPACING, 0))
            due = now - last >= EVENT_SPACING
            self._lines[event] = (now, 0) if due else (last, unlogged + 1)
        return unlogged if due else None

    def series(self, metric: Metric, labels: tuple[str, ...]) -> Series:
        """Return a series, created if new, or the series OTHER if there are too many."""
        with self.lock:
            known = self._by_name.setdefault(metric.name, {})
            if labels not in known and len(known) >= MAX_SERIES:
                labels = (OTHER,) * len(labels)  # base labels too, because the number of models is unbounded
            return known.setdefault(labels, Series(metric, labels))

    def restart(self) -> None:
        """Reset everything to zero. Views stay valid."""
        self.started = time.monotonic()
        self.events.clear()
        self._logged.clear()
        self._lines.clear()
        for series in [s for known in self._by_name.values() for s in known.values()]:
            series.value = series.sum = 0.0
            series.counts = [0] * len(series.counts)

    def forget(self, name: str, base: tuple[str, ...], kept: Series | None) -> None:
        """Set other series of an info with these base labels to 0, which marks them as outdated."""
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
        """Return copies of all series except outdated infos."""
        copies = []
        with self.lock:
            for series in [s for known in self._by_name.values() for s in known.values()]:
                if series.metric.kind == "info" and not series.value:  # outdated
                    continue
                copy = Series(series.metric, series.labels)
                copy.value, copy.sum, copy.counts = series.value, series.sum, list(series.counts)
                copies.append(copy)
        return copies

    def forward(self, sink: Sink, series: Series, value: float) -> None:
        """Send an update to a sink, and count its errors."""
        try:
            sink.update(series.metric, series.labels, value)
        except Exception as error:
            self.failed("sink", error)

    def complain(self, message: str) -> None:
        """Raise a ValueError if the store is strict, otherwise count the wrong use."""
        if self.strict:
            raise ValueError(message)
        self.failed("wrong use", message)

    def failed(self, what: str, error: BaseException | str) -> None:
        """Count an error of telemetry, and log it once per kind."""
        metric = CATALOG["dynaxx_telemetry_errors_total"]
        series = self.series(metric, ("", "0", what))
        with self.lock:
            series.value += 1
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(
                "telemetry: %s: %s (logged once; see dynaxx_telemetry_errors_total)", what, printable(error, most=500)
            )
