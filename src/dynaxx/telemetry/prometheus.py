# SPDX-License-Identifier: Apache-2.0
"""Expose metrics to Prometheus, at an endpoint of dynaxx or in a registry that is already served.

- `serve(port)` opens an endpoint on the loopback interface.
- `register()` adds the metrics to prometheus-client's registry, for a process that serves it.
- With PROMETHEUS_MULTIPROC_DIR set, both also write the metrics of this process to that folder, from which one process
  serves those of all processes (vLLM's workers, a web server's workers).

Needs prometheus-client.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

try:
    import prometheus_client
    from prometheus_client import CollectorRegistry, core, multiprocess, values
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError(f"dynaxx.telemetry.prometheus needs {error.name}: pip install 'dynaxx[metrics]'") from error

from dynaxx.telemetry.catalog import BASE_LABELS, CATALOG, Metric
from dynaxx.telemetry.http import Answer, HttpServer
from dynaxx.telemetry.recorder import Recorder, recorder
from dynaxx.telemetry.snapshot import UPTIME, Reading, Snapshot
from dynaxx.telemetry.sources import read_files

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def multiprocess_folder() -> str | None:
    """Return PROMETHEUS_MULTIPROC_DIR, or None if it is not set.

    Raises:
        ValueError: it is not a writable folder, or it was set after prometheus-client was imported.
    """
    folder = os.environ.get(FOLDER) or os.environ.get(FOLDER.lower())
    if not folder:
        return None
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"{FOLDER} must be a writable folder, got {folder!r}; create an empty one at each start")
    if not getattr(values.ValueClass, "_multiprocess", False):
        raise ValueError(f"{FOLDER} was set after prometheus_client was imported; set it before the process starts")
    return folder


class FolderSink:
    """Send every update to prometheus-client's metrics, which are stored in PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        self._metrics = {name: _client_metric(metric) for name, metric in CATALOG.items()}
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}

    def update(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Forward an update. See `Sink`."""
        key = (metric.name, labels)
        if key not in self._series:
            self._series[key] = self._metrics[metric.name].labels(*labels)
        series = self._series[key]
        if metric.kind == "counter":
            series.inc(value)
        elif metric.kind == "histogram":
            series.observe(value)
        else:
            series.set(value)


def write_to_folder(numbers: Recorder) -> None:
    """Also write the metrics of a recorder to PROMETHEUS_MULTIPROC_DIR from now on. Further calls do nothing.

    Current values of counters and gauges are copied, those of histograms are not, so call it at the start.
    """
    if not numbers.has_sink(FolderSink):
        numbers.add_sink(FolderSink(), copies=True)


def _client_metric(metric: Metric) -> Any:
    labels = metric.all_labels
    if metric.kind == "counter":
        return prometheus_client.Counter(metric.name, metric.help, labels, registry=None)
    if metric.kind == "histogram":
        return prometheus_client.Histogram(metric.name, metric.help, labels, buckets=metric.buckets, registry=None)
    modes = {"sum": "livesum", "min": "livemin", "max": "livemax", "last": "livemostrecent"}
    mode: Any = modes[metric.combine]
    return prometheus_client.Gauge(metric.name, metric.help, labels, registry=None, multiprocess_mode=mode)


PORT = 9466
LOOPBACK = "127.0.0.1"

logger = logging.getLogger("dynaxx")


class Server(HttpServer):
    """An endpoint at `url`, until `close()`. Also a context manager.

    Raises:
        ValueError: see `HttpServer`.
        OSError: see `HttpServer`.
    """

    def __init__(self, registry: CollectorRegistry, port: int, host: str) -> None:
        self._registry = registry
        super().__init__(self._metrics, port, host, "metrics")
        self.url = f"{self.address}/metrics"
        logger.info("metrics at %s", self.url)

    def _metrics(self, path: str) -> Answer:
        if path not in ("/metrics", "/"):
            return Answer(404, "text/plain; charset=utf-8", b"the metrics are at /metrics\n")
        return Answer(200, prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(self._registry))


def serve(port: int = PORT, *, host: str = LOOPBACK, numbers: Recorder | None = None) -> Server:
    """Serve the metrics of this process, or with PROMETHEUS_MULTIPROC_DIR those of all its processes.

    Args:
        port: the port; 0 takes a free one, see `Server.port`.
        host: the interface, by default the loopback interface. There is no password.
        numbers: the recorder; this process's recorder by default.

    Raises:
        ValueError: the port is out of range, or PROMETHEUS_MULTIPROC_DIR cannot be used.
        OSError: the port is taken or not allowed, or there is no such host; the message says which.
    """
    numbers = recorder() if numbers is None else numbers
    registry = CollectorRegistry()
    if (folder := multiprocess_folder()) is not None:
        write_to_folder(numbers)
        registry.register(FolderCollector(folder))
    else:
        registry.register(SnapshotCollector(lambda: Snapshot.of(numbers)))
    return Server(registry, port, host)


def register(registry: CollectorRegistry | None = None, *, numbers: Recorder | None = None) -> None:
    """Add the metrics of this process to a registry that another component serves. Further calls do nothing.

    With PROMETHEUS_MULTIPROC_DIR set, the metrics go into that folder, where the serving process reads them.

    Args:
        registry: prometheus-client's default registry if None, which transformers' and vLLM's servers show.
        numbers: the recorder; this process's recorder by default.

    Raises:
        ValueError: PROMETHEUS_MULTIPROC_DIR cannot be used.
    """
    numbers = recorder() if numbers is None else numbers
    if multiprocess_folder() is not None:
        write_to_folder(numbers)
        return
    registry = prometheus_client.REGISTRY if registry is None else registry
    collector = SnapshotCollector(lambda: Snapshot.of(numbers))
    try:
        registry.register(collector)
    except ValueError:  # prometheus-client raises it for names that are registered already
        logger.debug("metrics are registered already")


def serve_source(where: str, port: int = PORT, *, host: str = LOOPBACK) -> Server:
    """Serve the metrics of other processes.

    Args:
        where: a snapshot file, a folder or glob pattern of snapshot files, or a PROMETHEUS_MULTIPROC_DIR.
        port: see `serve`.
        host: see `serve`.

    Raises:
        ValueError: there is nothing to serve.
        OSError: see `serve`.
    """
    registry = CollectorRegistry()
    if os.path.isdir(where) and not glob.glob(os.path.join(glob.escape(where), "*.json")):
        if not glob.glob(os.path.join(glob.escape(where), "*.db")):
            raise ValueError(
                f"{where} holds neither snapshot files (*.json) nor Prometheus files (*.db); start what writes"
            )
        registry.register(FolderCollector(where))
    else:
        read_files(where)  # raises now rather than at the first scrape
        errors = Recorder(strict=False)
        registry.register(SnapshotCollector(lambda: _read_or_count(where, errors)))
    return Server(registry, port, host)


def _read_or_count(where: str, errors: Recorder) -> Snapshot:
    """Return the metrics in the files and their time. Count files that cannot be read in `errors`."""
    try:
        snapshot = read_files(where)
        faults: tuple[object, ...] = snapshot.faults
    except (ValueError, OSError) as error:
        snapshot, faults = Snapshot({}, 0.0), (error,)
    for fault in faults:
        errors.failed("snapshot file", str(fault))
    counted = replace(Snapshot.of(errors), time=0.0, uptime=None, events=[])
    readings = Snapshot.merged([counted, snapshot]).readings
    if snapshot.time:
        readings["dynaxx_snapshot_timestamp_seconds"] = [Reading(dict.fromkeys(BASE_LABELS, ""), snapshot.time)]
    return replace(snapshot, readings=readings)


class FolderCollector(Collector):
    """Collect the metrics of all processes that write to a PROMETHEUS_MULTIPROC_DIR. Truncated files are counted."""

    def __init__(self, folder: str) -> None:
        self._pattern = os.path.join(glob.escape(folder), "*.db")
        self._errors = Recorder(strict=False)

    def collect(self) -> Iterator[Any]:
        """Return the metrics for prometheus-client."""
        paths = sorted(path for path in glob.glob(self._pattern) if os.path.isfile(path))
        try:
            families = list(multiprocess.MultiProcessCollector.merge(paths))
        except Exception:  # another process truncated a file, which must not hide the other files
            families = list(multiprocess.MultiProcessCollector.merge([path for path in paths if self._is_whole(path)]))
        yield from families
        readings = Snapshot.of(self._errors).readings.get("dynaxx_telemetry_errors_total")
        name = "dynaxx_telemetry_errors"
        if readings and all(family.name != name for family in families):
            yield _family(CATALOG[f"{name}_total"], readings)

    def _is_whole(self, path: str) -> bool:
        try:
            list(multiprocess.MultiProcessCollector.merge([path]))
        except Exception as error:
            self._errors.failed("metrics file", f"{path}: {type(error).__name__}: {error}")
            return False
        return True


class SnapshotCollector(Collector):
    """Collect metrics from a snapshot that is taken at each scrape."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def collect(self) -> Iterator[Any]:
        """Return the metrics for prometheus-client."""
        snapshot = self._take()
        for name, readings in snapshot.readings.items():
            yield _family(CATALOG[name], readings)
        if snapshot.uptime is not None:
            yield _family(CATALOG[UPTIME], [Reading(dict.fromkeys(BASE_LABELS, ""), snapshot.uptime)])

    def describe(self) -> Iterator[Any]:
        """Return all names, so that a second registration is detected before anything is counted."""
        for metric in CATALOG.values():
            yield _family(metric, [])


def _family(metric: Metric, readings: list[Reading]) -> Any:
    labels = metric.all_labels
    family: Any
    if metric.kind == "histogram":
        family = core.HistogramMetricFamily(metric.name, metric.help, labels=labels)
        bounds = [*(floatToGoString(bound) for bound in metric.buckets), "+Inf"]
        for reading in readings:
            cumulative = [sum(reading.counts[: i + 1]) for i in range(len(bounds))]
            family.add_metric(_values(reading, labels), list(zip(bounds, cumulative, strict=True)), reading.sum)
        return family
    kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for reading in readings:
        family.add_metric(_values(reading, labels), reading.value)
    return family


def _values(reading: Reading, labels: tuple[str, ...]) -> list[str]:
    return [reading.labels[label] for label in labels]
