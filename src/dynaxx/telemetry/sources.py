"""Where another process's numbers are read from: its metrics endpoint, its snapshot file, or a folder of those."""

from __future__ import annotations

import glob
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise

from dynaxx.telemetry.catalog import CATALOG
from dynaxx.telemetry.files import read_all
from dynaxx.telemetry.snapshot import UPTIME, Reading, Snapshot

TIMEOUT = 5.0  # seconds
MOST_BYTES = 1 << 24
Read = Callable[[], Snapshot]


def source_of(where: str) -> Read:
    """What reads the numbers at `where`, anew with every call.

    Args:
        where: an URL, `host:port` or `:port` of a metrics endpoint; a snapshot file, or a folder or pattern (`*`) of
            some, one per process.

    Raises:
        ValueError: it is none of these. What is returned raises ValueError or OSError where there is nothing to read.
    """
    if where.startswith(("http://", "https://")):
        return lambda: read_endpoint(where)
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]*):\d+", where):
        host, _, port = where.rpartition(":")
        url = f"http://{host or '127.0.0.1'}:{port}/metrics"
        return lambda: read_endpoint(url)
    if "://" in where or not where:
        raise ValueError(f"SOURCE must be an http URL, host:port, or a snapshot file, got {where!r}")
    return lambda: read_files(where)


def read_files(where: str) -> Snapshot:
    """The snapshot file at `where`; those of a folder or a pattern together.

    Raises:
        ValueError: there is none, or one is not a snapshot file.
    """
    if os.path.isdir(where):
        where = os.path.join(glob.escape(where), "*.json")
    if not glob.has_magic(where):
        return read_all([where])
    paths = sorted(glob.glob(where))
    if not paths:
        raise ValueError(f"{where} matches no snapshot file; SnapshotFile(path) in each process writes one")
    return read_all(paths)


def read_endpoint(url: str) -> Snapshot:
    """What a Prometheus endpoint says of dynaxx.

    Raises:
        OSError: nobody answers.
        ValueError: the answer is no metrics, or has none of dynaxx.
        ImportError: prometheus-client is not installed.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            text = answer.read(MOST_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise OSError(f"{url} answers {error.code} {error.reason}; the metrics are usually at /metrics") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise OSError(
            f"{url} does not answer ({why}); dynaxx.telemetry.prometheus.serve(port) in the process, or "
            "dynaxx serve-metrics beside it, would"
        ) from None
    found = parse_text(text)
    if not found:
        raise ValueError(f"{url} shows no metric of dynaxx; register or serve them in the process that uses it")
    uptime = max((reading.value for reading in found.pop(UPTIME, [])), default=None)
    return Snapshot(found, time.time(), uptime)


def parse_text(text: str) -> dict[str, list[Reading]]:
    """Readings from Prometheus's text format; metrics of others are left out.

    Raises:
        ValueError: it is another format.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ImportError(f"reading an endpoint needs {error.name}: pip install 'dynaxx[metrics]'") from error
    found: dict[str, dict[tuple[str, ...], _Parts]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name, part = _split(sample.name)
                metric = CATALOG.get(name)
                if metric is None or not set(metric.all_labels) <= set(sample.labels):
                    continue
                labels = tuple(sample.labels[label] for label in metric.all_labels)
                parts = found.setdefault(name, {}).setdefault(labels, _Parts())
                if part == "_bucket":
                    parts.cumulative[float(sample.labels["le"])] = sample.value
                elif part == "_sum":
                    parts.sum = sample.value
                elif part == "":
                    parts.value = sample.value
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"what was read is not Prometheus's text format: {error}") from None
    readings: dict[str, list[Reading]] = {}
    for name, known in found.items():
        metric = CATALOG[name]
        for label_values, parts in known.items():
            if metric.kind == "info" and not parts.value:
                continue
            named = dict(zip(metric.all_labels, label_values, strict=True))
            reading = Reading(named, parts.value, parts.counts(metric.buckets), parts.sum)
            readings.setdefault(name, []).append(reading)
    return readings


class _Parts:
    """The lines of one series."""

    def __init__(self) -> None:
        self.value = self.sum = 0.0
        self.cumulative: dict[float, float] = {}

    def counts(self, buckets: tuple[float, ...]) -> tuple[float, ...]:
        if not buckets:
            return ()
        below = [0.0, *(self.cumulative.get(bound, 0.0) for bound in (*buckets, float("inf")))]
        return tuple(max(0.0, b - a) for a, b in pairwise(below))


def _split(name: str) -> tuple[str, str]:
    """A sample's metric, and which part of a histogram it is."""
    for part in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(part)
        if base != name and base in CATALOG:
            return base, part
    return name, ""
