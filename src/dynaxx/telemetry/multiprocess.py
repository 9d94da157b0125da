# SPDX-License-Identifier: Apache-2.0
"""Share one endpoint among processes: each writes its metrics to the folder that PROMETHEUS_MULTIPROC_DIR names.

The metrics are those of prometheus-client, so any process that serves that folder (vLLM's API server, our `serve`)
shows them.
"""

from __future__ import annotations

import os
from typing import Any

import prometheus_client
from prometheus_client import values

from dynaxx.telemetry.catalog import CATALOG, Metric
from dynaxx.telemetry.recorder import Recorder
from dynaxx.telemetry.snapshot import Snapshot

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
    if numbers.has_sink(FolderSink):
        return
    sink = FolderSink()
    for name, readings in Snapshot.of(numbers).readings.items():
        if CATALOG[name].kind != "histogram":
            for reading in readings:
                sink.update(
                    CATALOG[name], tuple(reading.labels[label] for label in CATALOG[name].all_labels), reading.value
                )
    numbers.add_sink(sink)


def _client_metric(metric: Metric) -> Any:
    labels = metric.all_labels
    if metric.kind == "counter":
        return prometheus_client.Counter(metric.name, metric.help, labels, registry=None)
    if metric.kind == "histogram":
        return prometheus_client.Histogram(metric.name, metric.help, labels, buckets=metric.buckets, registry=None)
    modes = {"sum": "livesum", "min": "livemin", "max": "livemax", "last": "livemostrecent"}
    mode: Any = modes[metric.combine]
    return prometheus_client.Gauge(metric.name, metric.help, labels, registry=None, multiprocess_mode=mode)
