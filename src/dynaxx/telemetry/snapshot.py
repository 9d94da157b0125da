# SPDX-License-Identifier: Apache-2.0
"""`Snapshot`: the numbers of one or more processes at one moment, and queries on them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dynaxx.printable import printable
from dynaxx.telemetry.catalog import CATALOG, Metric
from dynaxx.telemetry.recorder import LONGEST_LABEL, Recorder, harmless

FORMAT, VERSION = "dynaxx.snapshot", 1
MAX_EVENTS, MAX_FACTS = 256, 32  # limits on the events of a file and the facts of an event
LATEST = 253_402_300_799.0  # largest Unix time that `datetime` can represent, the end of the year 9999
UPTIME = "dynaxx_uptime_seconds"  # the metric that carries `Snapshot.uptime`


@dataclass(frozen=True)
class Reading:
    """One series."""

    labels: dict[str, str]
    value: float = 0.0  # value of a counter, gauge or info
    counts: tuple[float, ...] = ()  # values per bucket of a histogram, the last bucket beyond all bounds
    sum: float = 0.0

    @property
    def count(self) -> float:
        """The number of values in a histogram."""
        return sum(self.counts)

    def has(self, wanted: dict[str, str]) -> bool:
        """Return whether the series has these label values."""
        return all(self.labels.get(name) == value for name, value in wanted.items())


@dataclass(frozen=True)
class Snapshot:
    """Readings by metric name. Names that are not in the catalogue are ignored."""

    readings: dict[str, list[Reading]]
    time: float  # Unix time of the process that counted, seconds
    uptime: float | None = None  # seconds since that process started, by a monotonic clock; None if unknown
    events: list[dict[str, Any]] = field(default_factory=list)  # name, time, facts; oldest first
    faults: tuple[str, ...] = ()  # files and series that could not be read

    @classmethod
    def of(cls, numbers: Recorder) -> Snapshot:
        """Return the current metrics of this process."""
        readings: dict[str, list[Reading]] = {}
        for series in numbers.snapshot():
            labels = dict(zip(series.metric.all_labels, series.labels, strict=True))
            counts = tuple(series.counts) if series.metric.kind == "histogram" else ()
            readings.setdefault(series.metric.name, []).append(Reading(labels, series.value, counts, series.sum))
        events = [{"name": event.name, "time": event.time, "facts": event.facts} for event in numbers.events()]
        return cls(readings, time.time(), numbers.uptime, events)

    @classmethod
    def from_document(cls, document: Any) -> Snapshot:
        """Return the snapshot that `to_document` wrote. Every value is checked, since the file may be untrusted.

        Raises:
            ValueError: the document is not a snapshot, has a newer version, or has an invalid value.
        """
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"is not a snapshot file: `format` must be {FORMAT!r}")
        if document.get("version") != VERSION:
            raise ValueError(
                f"has version {printable(repr(document.get('version')), most=40)}, but this dynaxx reads {VERSION}; "
                "upgrade dynaxx"
            )
        try:
            readings = {
                name: [_reading(CATALOG[name], **entry) for entry in entries]
                for name, entries in document["metrics"].items()
                if name in CATALOG
            }
            events = [_event(**entry) for entry in document["events"][-MAX_EVENTS:]]
            return cls(readings, _finite(document["time"]), _finite(document["uptime_seconds"]), events)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"is damaged: {type(error).__name__}: {printable(error, most=200)}") from None

    def to_document(self) -> dict[str, Any]:
        """Return the snapshot as JSON data."""
        metrics = {
            name: [
                {"labels": r.labels, "counts": list(r.counts), "sum": r.sum}
                if r.counts
                else {"labels": r.labels, "value": r.value}
                for r in entries
            ]
            for name, entries in sorted(self.readings.items())
        }
        uptime = 0.0 if self.uptime is None else self.uptime
        head = {"format": FORMAT, "version": VERSION, "time": self.time, "uptime_seconds": uptime}
        return {**head, "metrics": metrics, "events": self.events}

    @classmethod
    def merged(cls, snapshots: Iterable[Snapshot], *, faults: tuple[str, ...] = ()) -> Snapshot:
        """Return several processes as one. Counters and histograms are summed, gauges combined per catalogue."""
        ordered = sorted(snapshots, key=lambda snapshot: snapshot.time)
        found: dict[str, dict[tuple[Any, ...], Reading]] = {}
        for snapshot in ordered:
            for name, readings in snapshot.readings.items():
                known = found.setdefault(name, {})
                for reading in readings:
                    key = tuple(sorted(reading.labels.items()))
                    known[key] = _together(CATALOG[name], known[key], reading) if key in known else reading
        uptimes = [snapshot.uptime for snapshot in ordered if snapshot.uptime is not None]
        events = sorted((event for s in ordered for event in s.events), key=lambda event: event["time"])
        merged = {name: list(known.values()) for name, known in found.items()}
        faults = (*faults, *(fault for s in ordered for fault in s.faults))
        return cls(merged, max((s.time for s in ordered), default=0.0), max(uptimes, default=None), events, faults)

    def since(self, earlier: Snapshot) -> Snapshot:
        """Return the counts since `earlier` and the current gauges. A restarted process counts from zero."""
        readings = {}
        for name, now in self.readings.items():
            metric = CATALOG[name]
            if metric.kind in ("gauge", "info"):
                readings[name] = now
                continue
            before = {tuple(sorted(r.labels.items())): r for r in earlier.readings.get(name, [])}
            readings[name] = [_minus(r, before.get(tuple(sorted(r.labels.items())))) for r in now]
        uptime = None
        if self.uptime is not None and earlier.uptime is not None:
            uptime = self.uptime - earlier.uptime if self.uptime >= earlier.uptime else self.uptime
        return Snapshot(readings, self.time, uptime, self.events, self.faults)

    def get(self, name: str, **labels: str) -> list[Reading]:
        """Return the readings of a metric with these labels."""
        assert name in CATALOG, name
        return [reading for reading in self.readings.get(name, []) if reading.has(labels)]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the values, or of the histograms' sums."""
        return sum(r.sum if CATALOG[name].kind == "histogram" else r.value for r in self.get(name, **labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return counters or gauges by one label, combined over the other labels."""
        found: dict[str, Reading] = {}
        for reading in self.get(name):
            key = reading.labels[label]
            found[key] = _together(CATALOG[name], found[key], reading) if key in found else reading
        return {key: reading.value for key, reading in found.items()}

    def gauge(self, name: str) -> float | None:
        """Return a gauge combined over all labels, or None if it was never set."""
        found = self.get(name)
        if not found:
            return None
        value = found[0]
        for reading in found[1:]:
            value = _together(CATALOG[name], value, reading)
        return value.value

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of a histogram's values, or None if it has none."""
        count = sum(reading.count for reading in self.get(name, **labels))
        return self.total(name, **labels) / count if count else None

    def quantile(self, name: str, q: float, **labels: str) -> float | None:
        """Return a quantile of a histogram's values, interpolated as in Prometheus, or None if it has none."""
        bounds, found = CATALOG[name].buckets, self.get(name, **labels)
        counts = [sum(reading.counts[i] for reading in found) for i in range(len(bounds) + 1)]
        rank, below = q * sum(counts), 0.0
        if not sum(counts):
            return None
        for i, count in enumerate(counts[:-1]):
            if below + count >= rank and count:
                low = bounds[i - 1] if i else 0.0
                return low + (bounds[i] - low) * (rank - below) / count
            below += count
        return bounds[-1]


def _reading(
    metric: Metric, *, labels: dict[str, str], value: float = 0.0, counts: Any = (), sum: float = 0.0
) -> Reading:
    """Return a checked reading from a file."""
    wanted = len(metric.buckets) + 1 if metric.kind == "histogram" else 0
    if set(labels) != set(metric.all_labels) or len(counts) != wanted:
        raise ValueError(f"{metric.name} must have labels {metric.all_labels} and {wanted} buckets, got {labels}")
    named = {name: printable(value, most=LONGEST_LABEL) for name, value in labels.items()}
    return Reading(named, _finite(value), tuple(map(_finite, counts)), _finite(sum))


def _event(*, name: str, time: float, facts: dict[str, Any]) -> dict[str, Any]:
    """Return a checked event from a file."""
    if not isinstance(name, str) or not 0 <= _finite(time) <= LATEST:
        raise ValueError(f"an event must have a name and a Unix time, got {name!r} at {time!r}")
    kept = {printable(key, most=80): harmless(value) for key, value in list(facts.items())[:MAX_FACTS]}
    return {"name": printable(name, most=80), "time": float(time), "facts": kept}


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a value must be a finite number, got {value!r}")
    return float(value)


def _together(metric: Metric, a: Reading, b: Reading) -> Reading:
    """Combine the readings of one series from two processes. `b` is the newer one."""
    if metric.kind == "histogram":
        return Reading(a.labels, 0.0, tuple(x + y for x, y in zip(a.counts, b.counts, strict=True)), a.sum + b.sum)
    if metric.kind == "counter" or metric.combine == "sum":
        return Reading(a.labels, a.value + b.value)
    if metric.combine == "last" or metric.kind == "info":
        return b
    return Reading(a.labels, min(a.value, b.value) if metric.combine == "min" else max(a.value, b.value))


def _minus(now: Reading, before: Reading | None) -> Reading:
    if before is None or now.value < before.value or now.count < before.count:  # new, or restarted
        return now
    counts = tuple(x - y for x, y in zip(now.counts, before.counts, strict=True))
    return Reading(now.labels, now.value - before.value, counts, now.sum - before.sum)
