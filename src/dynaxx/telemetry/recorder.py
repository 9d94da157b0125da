"""`Recorder`: counters, gauges and histograms of one process; thread-safe, about a microsecond a call, no dependency.

It never raises into a request: an unknown name or a value that is no number is counted and said once. A strict recorder
(under DYNAXX_DEBUG=1, and in tests) raises instead.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dynaxx.telemetry.catalog import CATALOG, EVENTS, Metric

MOST_SERIES = 1024  # per metric; a label value that never repeats must not eat the memory
OTHER = "other"
RECENT_EVENTS = 64
LONGEST_FACT = 200  # characters
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


@dataclass(frozen=True)
class Event:
    """Something that happened: a name of `EVENTS`, Unix time in seconds, and a few facts about it."""

    name: str
    time: float
    facts: dict[str, Any]


class Recorder:
    """Where everything is counted. `bind` gives a view with other base labels on the same numbers."""

    def __init__(self, *, strict: bool | None = None, model_name: str = "", engine: str = "0") -> None:
        self._base = {"model_name": model_name, "engine": engine}
        self._found: dict[tuple[Any, ...], Series] = {}
        self._store = _Store(os.environ.get("DYNAXX_DEBUG") == "1" if strict is None else strict)

    def bind(self, **base: str) -> Recorder:
        """The same numbers under other base labels: `model_name`, `engine`."""
        unknown = set(base) - set(self._base)
        if unknown:
            raise ValueError(f"`bind` takes {', '.join(self._base)}, got {', '.join(sorted(unknown))}")
        view = Recorder.__new__(Recorder)
        view._base = {**self._base, **{name: str(value) for name, value in base.items()}}
        view._found, view._store = {}, self._store
        return view

    # ---- writing -------------------------------------------------------------------------------------------------

    def add(self, name: str, value: float = 1, **labels: str | int) -> None:
        """Count: raise a counter by `value` >= 0."""
        self._update("counter", name, value, labels)

    def set(self, name: str, value: float, **labels: str | int) -> None:
        """Set a gauge."""
        self._update("gauge", name, value, labels)

    def observe(self, name: str, value: float, **labels: str | int) -> None:
        """Put a value into a histogram."""
        self._update("histogram", name, value, labels)

    def info(self, name: str, **labels: str | int) -> None:
        """Say what is in force; what was said before under the same base labels is forgotten."""
        self._store.forget(name, tuple(self._base.values()), self._update("info", name, 1.0, labels))

    def event(self, name: str, **facts: str | float) -> None:
        """Count an event, remember and log it, with a few facts: numbers and names of ours, never content."""
        if name not in EVENTS:
            self._store.complain(f"unknown event {name!r}; declare it in telemetry/catalog.py")
            return
        happened = Event(name, time.time(), {**self._base, **{key: harmless(value) for key, value in facts.items()}})
        self._store.events.append(happened)
        more = self._store.unsaid(name)
        if more is not None:
            also = f" ({more} more since the last line)" if more else ""
            logger.info("%s: %s%s", name, EVENTS[name], also, extra={"facts": happened.facts})
        self.add("dynaxx_events_total", event=name)

    def _update(self, kind: str, name: str, value: float, labels: dict[str, Any]) -> Series | None:
        try:
            series = self._found[(name, *labels.items())]
        except (KeyError, TypeError):
            found = self._find(kind, name, labels)
            if found is None:
                return None
            series = found
        if series.metric.kind != kind:
            self._store.complain(f"{name} is a {series.metric.kind}, not a {kind}")
            return None
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value) or (value < 0 and kind == "counter"):
            self._store.complain(f"{name} was given {value}")
            return None
        with self._store.lock:
            if kind == "counter":
                series.value += value
            elif kind == "histogram":
                series.counts[bisect_left(series.metric.buckets, value)] += 1
                series.sum += value
            else:
                series.value = value
        for sink in self._store.sinks:
            self._store.forward(sink, series, value)
        return series

    def _find(self, kind: str, name: str, labels: dict[str, Any]) -> Series | None:
        """The series of a name and its labels in any order, made if new; None, and a complaint, if it cannot be."""
        metric = CATALOG.get(name)
        if metric is None:
            self._store.complain(f"unknown metric {name!r}; declare it in telemetry/catalog.py")
            return None
        given = {**self._base, **labels}
        if set(given) != set(metric.all_labels):
            self._store.complain(f"{name} has labels {metric.labels}, got {tuple(labels)}")
            return None
        series = self._store.series(metric, tuple(str(given[label]) for label in metric.all_labels))
        hashable = all(isinstance(value, str | int) for value in labels.values())
        if hashable and len(self._found) < MOST_SERIES * len(CATALOG):
            self._found[(name, *labels.items())] = series
        return series

    # ---- reading -------------------------------------------------------------------------------------------------

    def value(self, name: str, **labels: str | int) -> float:
        """A counter's, gauge's or info's value, or how many values a histogram has; summed over labels not named."""
        wanted = {label: str(value) for label, value in labels.items()}
        found = [s for s in self.snapshot() if s.metric.name == name and _matches(s, wanted)]
        return float(sum(sum(s.counts) if s.metric.kind == "histogram" else s.value for s in found))

    def snapshot(self) -> list[Series]:
        """Copies of all series, consistent with one another."""
        for source in list(self._store.sources):
            try:
                source.flush()
            except Exception as error:
                self.failed("source", error)
        return self._store.copy()

    def events(self) -> list[Event]:
        """The most recent events, oldest first."""
        return list(self._store.events)

    @property
    def uptime(self) -> float:
        """Seconds since this recorder was made, by a clock that never goes back."""
        return time.monotonic() - self._store.started

    # ---- plumbing ------------------------------------------------------------------------------------------------

    def add_sink(self, sink: Sink) -> None:
        """Send every update to `sink` as well; one that raises is counted and never heard by a request."""
        self._store.sinks = (*self._store.sinks, sink)

    def has_sink(self, kind: type) -> bool:
        """Whether a sink of this kind is there."""
        return any(isinstance(sink, kind) for sink in self._store.sinks)

    def remove_sink(self, sink: Sink) -> None:
        self._store.sinks = tuple(other for other in self._store.sinks if other is not sink)

    def add_source(self, source: Source) -> None:
        """Ask `source`, as long as it lives, whenever numbers are read."""
        self._store.sources.add(source)

    def failed(self, what: str, error: BaseException | str) -> None:
        """Count something telemetry could not do, and say it once per kind."""
        self._store.failed(what, error)


class _Store:
    """The numbers themselves, shared by all views of a recorder."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.lock = threading.Lock()
        self.sinks: tuple[Sink, ...] = ()
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self.events: deque[Event] = deque(maxlen=RECENT_EVENTS)
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
                labels = (*labels[:2], *(OTHER,) * len(metric.labels))
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
            logger.warning("telemetry: %s: %s (said once; dynaxx_telemetry_errors_total counts)", what, error)


def _matches(series: Series, wanted: dict[str, str]) -> bool:
    labels = dict(zip(series.metric.all_labels, series.labels, strict=True))
    return all(labels.get(name) == value for name, value in wanted.items())


_default = Recorder()


def harmless(value: Any) -> Any:
    """A fact as it may be kept and shown: numbers and short words as they are; of anything else its type alone."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= LONGEST_FACT else value[: LONGEST_FACT - 3] + "..."
    return f"<{type(value).__name__}>"


def recorder() -> Recorder:
    """This process's recorder."""
    return _default


@contextmanager
def use(other: Recorder) -> Iterator[Recorder]:
    """Make `other` this process's recorder within the block; for tests."""
    global _default
    before, _default = _default, other
    try:
        yield other
    finally:
        _default = before


def _after_fork() -> None:
    """A child starts from zero, with a lock that no lost thread holds; what the parent counted is the parent's."""
    _default._store.restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
