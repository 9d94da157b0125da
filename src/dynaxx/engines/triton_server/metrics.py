# SPDX-License-Identifier: Apache-2.0
"""Export dynaxx's metrics through Triton's `/metrics` endpoint.

Triton's Python backend supports only counters and gauges. A histogram is exported as the counters that Prometheus
stores for it, `NAME_bucket` with `le`, `NAME_sum` and `NAME_count`, so queries do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from dynaxx.telemetry.catalog import CATALOG, Metric
from dynaxx.telemetry.recorder import Recorder, recorder
from dynaxx.telemetry.store import Series

logger = logging.getLogger("dynaxx")


class _Sample(NamedTuple):
    """One metric value in Triton's form."""

    name: str
    counts: bool  # True for a counter, False for a gauge
    help: str
    labels: dict[str, str]
    value: float


class TritonMetrics:
    """Copies this process's metrics to Triton, in the thread of the caller.

    Call it only while Triton waits for the model. To a call from another thread a server that stops may never answer,
    and the call keeps the interpreter's lock: the model does not end, and the server neither.

    Args:
        utils: Triton's `triton_python_backend_utils`.
        numbers: the recorder; this process's by default.
    """

    def __init__(self, utils: Any, numbers: Recorder | None = None) -> None:
        self._utils, self._numbers = utils, numbers
        self._families: dict[str, Any] = {}
        self._shown: dict[tuple[str, ...], tuple[Any, float]] = {}
        self._failed = False

    def copy(self) -> None:
        """Copy what changed since the last call."""
        if self._failed:
            return
        try:
            for series in (self._numbers or recorder()).snapshot():
                for sample in _samples(series):
                    self._show(sample)
        except Exception as error:  # a server without metrics still answers requests
            logger.warning("metrics are not exported to Triton: %s", error)
            self._failed = True

    def _show(self, sample: _Sample) -> None:
        key = (sample.name, *sample.labels.values())
        metric, before = self._shown.get(key) or (self._new(sample), 0.0)
        if not sample.counts and sample.value != before:
            metric.set(sample.value)
        elif sample.counts and sample.value > before:
            metric.increment(sample.value - before)
        self._shown[key] = (metric, sample.value)

    def _new(self, sample: _Sample) -> Any:
        family = self._families.get(sample.name)
        if family is None:
            kinds = self._utils.MetricFamily
            kind = kinds.COUNTER if sample.counts else kinds.GAUGE
            family = kinds(name=sample.name, description=sample.help, kind=kind)
            self._families[sample.name] = family
        return family.Metric(labels=sample.labels)


def _samples(series: Series) -> Iterator[_Sample]:
    metric: Metric = CATALOG[series.metric.name]
    labels = dict(zip(metric.all_labels, series.labels, strict=True))
    if metric.kind != "histogram":
        yield _Sample(metric.name, metric.kind == "counter", metric.help, labels, series.value)
        return
    total = 0
    for bound, count in zip((*metric.buckets, "+Inf"), series.counts, strict=True):
        total += count
        yield _Sample(f"{metric.name}_bucket", True, metric.help, {**labels, "le": str(bound)}, total)
    yield _Sample(f"{metric.name}_sum", True, metric.help, labels, series.sum)
    yield _Sample(f"{metric.name}_count", True, metric.help, labels, total)
