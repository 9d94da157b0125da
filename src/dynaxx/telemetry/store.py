"""The numbers behind a recorder: series by metric and label values, under one lock, with who else is told."""

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
    """Where every update goes as well, at once: for exporters that keep their own numbers."""

    def update(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Add a counter's `value`, set a gauge to it, or observe it in a histogram."""


class Source(Protocol):
    """Something with measurements under way that should be asked before numbers are read."""

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
        self._said: set[str] = set()
        self._lines: dict[str, tuple[float, int]] = {}  # by event: when it was last logged, how many came since

    def unsaid(self, event: str) -> int | None:
        """How many of this event went unlogged before this one; None if this one is to go unlogged, too."""
        now = time.monotonic()
        with self.lock:
            last, unsaid = self._lines.get(event, (now - EVENT_SPACING, 0))
            due = now - last >= EVENT_SPACING
            self._lines[event] = (now, 0) if due else (last, unsaid + 1)
        return unsaid if due else None

    def series(self, metric: Metric, labels: tuple[str, ...]) -> Series:
        with self.lock:
            known = self._by_name.setdefault(metric.name, {})
            if labels not in known and len(known) >= MOST_SERIES:
                labels = (OTHER,) * len(labels)  # base labels, too: models may come and go without end
            return known.setdefault(labels, Series(metric, labels))

    def restart(self) -> None:
        """Take everything to zero under a new lock; views stay valid."""
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.events.clear()
        self._said.clear()
        self._lines.clear()
        for series in [s for known in self._by_name.values() for s in known.values()]:
            series.value = series.sum = 0.0
            series.counts = [0] * len(series.counts)

    def forget(self, name: str, base: tuple[str, ...], kept: Series | None) -> None:
        """Take other series of an info with these base labels to 0, which is "no more"."""
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
        try:
            sink.update(series.metric, series.labels, value)
        except Exception as error:
            self.failed("sink", error)

    def complain(self, message: str) -> None:
        if self.strict:
            raise ValueError(message)
        self.failed("wrong use", message)

    def failed(self, what: str, error: BaseException | str) -> None:
        metric = CATALOG["dynaxx_telemetry_errors_total"]
        series = self.series(metric, ("", "0", what))
        with self.lock:
            series.value += 1
        if what not in self._said:
            self._said.add(what)
            logger.warning(
                "telemetry: %s: %s (said once; dynaxx_telemetry_errors_total counts)", what, printable(error, most=500)
            )
