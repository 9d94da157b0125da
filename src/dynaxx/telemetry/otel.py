# SPDX-License-Identifier: Apache-2.0
"""Export to OpenTelemetry: every update goes to an instrument of a meter provider. Needs the SDK.

Instruments have the metrics' names with a dot after the namespace and without `_total` and the unit, which is a
separate field. A collector that exports them to Prometheus restores names such as `dynaxx_attention_seconds`.
"""

from __future__ import annotations

from typing import Any

try:
    from opentelemetry import metrics
except ImportError as error:
    raise ImportError(f"dynaxx.telemetry.otel needs {error.name}: pip install 'dynaxx[otel]'") from error

from dynaxx.telemetry.catalog import CATALOG, Metric
from dynaxx.telemetry.recorder import Recorder, recorder

UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1", "_nats": "nat"}


class OtelSink:
    """Forward updates to one instrument per metric."""

    def __init__(self, provider: Any) -> None:
        meter = metrics.get_meter("dynaxx") if provider is None else provider.get_meter("dynaxx")
        self._instruments = {metric.name: _instrument(meter, metric) for metric in CATALOG.values()}

    def update(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Forward an update. See `Sink`."""
        self._instruments[metric.name](value, dict(zip(metric.all_labels, labels, strict=True)))


def export(provider: Any = None, *, numbers: Recorder | None = None) -> OtelSink:
    """Send this process's metrics to a meter provider from now on, by default to the global one.

    Current values of counters and gauges are copied, those of histograms are not. To stop, pass the result to
    `numbers.remove_sink`.
    """
    numbers = recorder() if numbers is None else numbers
    sink = OtelSink(provider)
    numbers.add_sink(sink, copies=True)
    return sink


def otel_name(metric: Metric) -> tuple[str, str]:
    """Return the name and unit of a metric in OpenTelemetry."""
    name = metric.name.removesuffix("_total").replace("dynaxx_", "dynaxx.", 1)
    return name, next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "1")


def _instrument(meter: Any, metric: Metric) -> Any:
    """Return a function that takes a value and attributes."""
    name, unit = otel_name(metric)
    if metric.kind == "counter":
        return meter.create_counter(name, unit, metric.help).add
    if metric.kind == "histogram":
        bounds = list(metric.buckets)
        return meter.create_histogram(name, unit, metric.help, explicit_bucket_boundaries_advisory=bounds).record
    return meter.create_gauge(name, unit, metric.help).set
