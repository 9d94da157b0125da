# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: counters, gauges and histograms of one process. It is thread-safe and takes about a microsecond per call.

It never raises into a request: an unknown name or an invalid value is counted and logged once. A strict recorder (with
DYNAXX_DEBUG=1, and in tests) raises instead.
"""

from __future__ import annotations

import logging
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynaxx.printable import printable
from dynaxx.telemetry.catalog import CATALOG, EVENTS
from dynaxx.telemetry.store import MAX_SERIES, Series, Sink, Source, Store

LONGEST_FACT = LONGEST_LABEL = 200  # characters

logger = logging.getLogger("dynaxx")


@dataclass(frozen=True)
class Event:
    """An event: a name of `EVENTS`, Unix time in seconds, and a few facts."""

    name: str
    time: float
    facts: dict[str, Any]


class Recorder:
    """The metrics of a process. `bind` returns a view with other base labels on the same numbers."""

    def __init__(self, *, strict: bool | None = None, model_name: str = "", engine: str = "0") -> None:
        self._base = {"model_name": _label(model_name), "engine": _label(engine)}
        self._found: dict[tuple[Any, ...], Series] = {}
        self._store = Store(os.environ.get("DYNAXX_DEBUG") == "1" if strict is None else strict)

    def bind(self, **base: str) -> Recorder:
        """Return a view on the same numbers with other base labels: `model_name`, `engine`."""
        unknown = set(base) - set(self._base)
        if unknown:
            raise ValueError(f"`bind` takes {', '.join(self._base)}, got {', '.join(sorted(unknown))}")
        view = Recorder.__new__(Recorder)
        view._base = {**self._base, **{name: printable(value, most=LONGEST_LABEL) for name, value in base.items()}}
        view._found, view._store = {}, self._store
        return view

    def add(self, name: str, value: float = 1, **labels: str | int) -> None:
        """Increase a counter by `value` >= 0."""
        self._update("counter", name, value, labels)

    def counter(self, name: str, **labels: str | int) -> Callable[..., None]:
        """Return a function that adds one, or a given number. It is faster than `add` for frequent calls."""
        series, store = self._find(name, labels), self._store
        if series is None or series.metric.kind != "counter":
            return lambda number=1: self.add(name, number, **labels)

        def count(number: float = 1) -> None:
            with store.lock:
                series.value += number
            for sink in store.sinks:
                store.forward(sink, series, number)

        return count

    def set(self, name: str, value: float, **labels: str | int) -> None:
        """Set a gauge."""
        self._update("gauge", name, value, labels)

    def observe(self, name: str, value: float, **labels: str | int) -> None:
        """Add a value to a histogram."""
        self._update("histogram", name, value, labels)

    def info(self, name: str, **labels: str | int) -> None:
        """Set an info metric. A previous one with the same base labels is set to 0."""
        self._store.forget(name, tuple(self._base.values()), self._update("info", name, 1.0, labels))

    def event(self, name: str, **facts: str | float) -> None:
        """Count, store and log an event with a few facts. Facts are numbers and names, never content."""
        if name not in EVENTS:
            self._store.complain(f"unknown event {name!r}; declare it in telemetry/catalog.py")
            return
        happened = Event(name, time.time(), {**self._base, **{key: harmless(value) for key, value in facts.items()}})
        self._store.events.append(happened)
        more = self._store.unlogged(name)
        if more is not None:
            also = f" ({more} more since the last line)" if more else ""
            logger.info("%s: %s%s", name, EVENTS[name], also, extra={"facts": happened.facts})
        self.add("dynaxx_events_total", event=name)

    def _update(self, kind: str, name: str, value: float, labels: dict[str, Any]) -> Series | None:
        try:
            series = self._found[(name, *labels.items())]
        except (KeyError, TypeError):
            found = self._find(name, labels)
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

    def _find(self, name: str, labels: dict[str, Any]) -> Series | None:
        """Return the series of a name and its labels, created if new, or None if they are invalid."""
        metric = CATALOG.get(name)
        if metric is None:
            self._store.complain(f"unknown metric {name!r}; declare it in telemetry/catalog.py")
            return None
        given = {**self._base, **labels}
        if set(given) != set(metric.all_labels):
            self._store.complain(f"{name} has labels {metric.labels}, got {tuple(labels)}")
            return None
        series = self._store.series(metric, tuple(_label(given[label]) for label in metric.all_labels))
        hashable = all(isinstance(value, str | int) for value in labels.values())
        if hashable and len(self._found) < MAX_SERIES * len(CATALOG):
            self._found[(name, *labels.items())] = series
        return series

    def value(self, name: str, **labels: str | int) -> float:
        """Return the value of a counter, gauge or info, or the count of a histogram, summed over unnamed labels."""
        wanted = {label: str(value) for label, value in labels.items()}
        found = [s for s in self.snapshot() if s.metric.name == name and _matches(s, wanted)]
        return float(sum(sum(s.counts) if s.metric.kind == "histogram" else s.value for s in found))

    def snapshot(self) -> list[Series]:
        """Return copies of all series, consistent with one another."""
        for source in list(self._store.sources):
            try:
                source.flush()
            except Exception as error:
                self.failed("source", error)
        return self._store.copy()

    def events(self) -> list[Event]:
        """Return the most recent events, oldest first."""
        return list(self._store.events)

    @property
    def uptime(self) -> float:
        """Return the seconds since this recorder was created, by a monotonic clock."""
        return time.monotonic() - self._store.started

    def add_sink(self, sink: Sink, *, copies: bool = False) -> None:
        """Also send every update to `sink`. Its errors are counted and never reach a request.

        With `copies`, `sink` first gets the current values of counters, gauges and infos, but not those of histograms.
        """
        for series in self.snapshot() if copies else ():
            if series.metric.kind != "histogram":
                sink.update(series.metric, series.labels, series.value)
        self._store.sinks = (*self._store.sinks, sink)

    def has_sink(self, kind: type) -> bool:
        """Return whether a sink of this kind is registered."""
        return any(isinstance(sink, kind) for sink in self._store.sinks)

    def remove_sink(self, sink: Sink) -> None:
        """Stop sending updates to `sink`."""
        self._store.sinks = tuple(other for other in self._store.sinks if other is not sink)

    def add_source(self, source: Source) -> None:
        """Flush `source` whenever metrics are read, until it is collected."""
        self._store.sources.add(source)

    def failed(self, what: str, error: BaseException | str) -> None:
        """Count an error of telemetry, and log it once per kind."""
        self._store.failed(what, error)


def _label(value: Any) -> str:
    """Return a label value for display: short, and without characters that a terminal would act on."""
    return str(value) if isinstance(value, int) else printable(value, most=LONGEST_LABEL)


def _matches(series: Series, wanted: dict[str, str]) -> bool:
    labels = dict(zip(series.metric.all_labels, series.labels, strict=True))
    return all(labels.get(name) == value for name, value in wanted.items())


_default = Recorder()


def harmless(value: Any) -> Any:
    """Return a fact that is safe to store and show: numbers and short words unchanged, otherwise only the type."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return printable(value, most=LONGEST_FACT)
    return f"<{type(value).__name__}>"


def recorder() -> Recorder:
    """Return this process's recorder."""
    return _default


@contextmanager
def use(other: Recorder) -> Iterator[Recorder]:
    """Make `other` the recorder of this process within the block. For tests."""
    global _default
    before, _default = _default, other
    try:
        yield other
    finally:
        _default = before
