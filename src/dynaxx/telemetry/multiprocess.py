# SPDX-License-Identifier: Apache-2.0
"""Share one endpoint among processes: each writes its numbers to the folder that PROMETHEUS_MULTIPROC_DIR names.

Through prometheus-client's own metrics, so that whoever serves that folder (vLLM's API server, our `serve`) shows them.
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
    """Return PROMETHEUS_MULTIPROC_DIR, None if it is not set.

    Raises:
        ValueError: it is no folder that can be written, or it was set after prometheus-client was imported.
    """
    folder = os.environ.get(FOLDER) or os.environ.get(FOLDER.lower())
    if not folder:
        return None
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(
            f"{FOLDER} must be a folder that can be written, got {folder!r}: make it, empty, at each start"
        )
    if not getattr(values.ValueClass, "_multiprocess", False):
        raise ValueError(f"{FOLDER} was set after prometheus_client was imported; set it before the process starts")
    return folder


class FolderSink:
    """Sends every update to prometheus-client's own metrics, which live in PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        self._metrics = {name: _client_metric(metric) for name, metric in CATALOG.items()}
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}

    def update(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Forward an update, as `Sink`."""
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
    """Write a recorder's numbers to PROMETHEUS_MULTIPROC_DIR as well, from now on; more calls do nothing.

    What counters and gauges say already is taken over. Histograms begin with what comes: call it at the start.
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
