# SPDX-License-Identifier: Apache-2.0
"""Read the metrics of another process from its endpoint, its snapshot file, or a folder of snapshot files."""

from __future__ import annotations

import glob
import http.client
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from dynaxx.printable import printable
from dynaxx.telemetry.catalog import CATALOG
from dynaxx.telemetry.files import read_snapshots
from dynaxx.telemetry.http import is_loopback
from dynaxx.telemetry.recorder import LONGEST_LABEL
from dynaxx.telemetry.snapshot import UPTIME, Reading, Snapshot

TIMEOUT = 5.0  # longest time in seconds without a byte
LONGEST = 15.0  # longest time in seconds for a whole response
MAX_BYTES = 1 << 24
Read = Callable[[], Snapshot]


def source_of(where: str) -> Read:
    """Return a function that reads the metrics at `where` with every call.

    Args:
        where: a URL, `host:port` or `:port` of a metrics endpoint; a snapshot file; or a folder or glob pattern of
            snapshot files, one per process.

    Returns:
        A function that raises ValueError or OSError if there is nothing to read.

    Raises:
        ValueError: `where` is none of these.
    """
    if where.startswith(("http://", "https://")):
        _check_url(where)
        return lambda: read_endpoint(where)
    if re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]*):[0-9]{1,5}", where, re.ASCII):
        host, _, port = where.rpartition(":")
        url = f"http://{host or '127.0.0.1'}:{port}/metrics"
        _check_url(url)
        return lambda: read_endpoint(url)
    if "://" in where or not where:
        raise ValueError(f"SOURCE must be an http URL, host:port, or a snapshot file, got {printable(repr(where))}")
    return lambda: read_files(where)


def read_files(where: str) -> Snapshot:
    """Return the snapshot in a file, or in all files of a folder or a pattern.

    Raises:
        ValueError: there is no file, or none can be read. `Snapshot.faults` names single files that cannot be read.
        OSError: no file can be read.
    """
    if os.path.isdir(where):
        where = os.path.join(glob.escape(where), "*.json")
    if not glob.has_magic(where):
        return read_snapshots([where])
    paths = sorted(glob.glob(where))
    if not paths:
        raise ValueError(f"{where} matches no snapshot file; SnapshotFile(path) in each process writes one")
    return read_snapshots(paths)


def read_endpoint(url: str) -> Snapshot:
    """Return dynaxx's metrics from a Prometheus endpoint. Loopback addresses are read without a proxy.

    Raises:
        OSError: there is no response, or it is not HTTP.
        ValueError: the response is not in Prometheus's format, or has no metric of dynaxx.
        ImportError: prometheus-client is not installed.
    """
    url = printable(url)
    try:
        text = _fetch(url).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        where = error.headers.get("Location")
        hint = f"it redirects to {printable(where, most=200)}" if where else "the metrics are usually at /metrics"
        raise OSError(f"{url} responds {error.code} {printable(error.reason, most=80)}; {hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        message = str(why) if isinstance(why, OSError | str) else f"{type(why).__name__}: {why}"
        raise OSError(
            f"{url} does not respond like a metrics endpoint ({printable(message, most=200)}); call "
            "dynaxx.telemetry.prometheus.serve(port) in the process, or run dynaxx serve-metrics"
        ) from None
    found, faults = parse_text(text)
    if not found:
        raise ValueError(f"{url} has no metric of dynaxx; register or serve them in the process that uses dynaxx")
    uptime = max((reading.value for reading in found.pop(UPTIME, [])), default=None)
    return Snapshot(found, time.time(), uptime, faults=faults)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirects, so that only the given address is read."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        wrong = not parts.hostname or (parts.port is not None and parts.port > 65535) or not url.isascii()
    except ValueError:
        wrong = True
    if wrong or not url.isprintable() or " " in url:
        raise ValueError(f"SOURCE must be an http URL, host:port, or a snapshot file, got {printable(repr(url))}")


def _fetch(url: str) -> bytes:
    """Return the body at a URL, up to `MAX_BYTES`."""
    handlers: list[Any] = [_NoRedirects()]
    if is_loopback(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    deadline, body = time.monotonic() + LONGEST, bytearray()
    with urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT) as answer:
        while len(body) < MAX_BYTES and (part := answer.read1(1 << 16)):
            body += part
            if time.monotonic() > deadline:
                raise TimeoutError(f"the response takes longer than {LONGEST:g} s")
        if answer.length:  # the connection ended early; `read1` does not report it
            raise http.client.IncompleteRead(bytes(body[:0]), answer.length)
    return bytes(body[:MAX_BYTES])


def parse_text(text: str) -> tuple[dict[str, list[Reading]], tuple[str, ...]]:
    """Parse Prometheus's text format. Metrics of other software are ignored.

    Returns:
        The readings, and descriptions of the series that were dropped because their values are not finite.

    Raises:
        ValueError: the text has another format.
        ImportError: prometheus-client is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ImportError(f"reading an endpoint needs {error.name}: pip install 'dynaxx[metrics]'") from error
    found: dict[str, dict[tuple[str, ...], _Parts]] = {}
    faults: dict[str, None] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name, part = _split(sample.name)
                metric = CATALOG.get(name)
                if metric is None or not set(metric.all_labels) <= set(sample.labels):
                    continue
                if not math.isfinite(sample.value):
                    faults[f"{name} is {sample.value}"] = None
                    continue
                labels = tuple(printable(sample.labels[label], most=LONGEST_LABEL) for label in metric.all_labels)
                parts = found.setdefault(name, {}).setdefault(labels, _Parts())
                if part == "_bucket":
                    parts.cumulative[float(sample.labels["le"])] = sample.value
                elif part == "_sum":
                    parts.sum = sample.value
                elif part == "":
                    parts.value = sample.value
    except Exception as error:  # an external parser reads untrusted text
        raise ValueError(f"the response is not in Prometheus's text format: {printable(error, most=200)}") from None
    readings: dict[str, list[Reading]] = {}
    for name, known in found.items():
        metric = CATALOG[name]
        for label_values, parts in known.items():
            if metric.kind == "info" and not parts.value:
                continue
            named = dict(zip(metric.all_labels, label_values, strict=True))
            reading = Reading(named, parts.value, parts.counts(metric.buckets), parts.sum)
            readings.setdefault(name, []).append(reading)
    return readings, tuple(faults)


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
    """Return the metric of a sample, and the part of a histogram that it is."""
    for part in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(part)
        if base != name and base in CATALOG:
            return base, part
    return name, ""
