# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry collects the metrics of dynaxx."""

import pytest

sdk = pytest.importorskip("opentelemetry.sdk.metrics")
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402

from dynaxx.telemetry import CATALOG  # noqa: E402
from dynaxx.telemetry.otel import export, otel_name  # noqa: E402


def collected(reader) -> dict:
    data = reader.get_metrics_data()
    metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
    return {metric.name: metric for metric in metrics}


def test_every_update_arrives_with_its_labels(telemetry):
    telemetry.set("dynaxx_kill_switch", 1)  # before: taken over
    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    sink = export(provider)
    view = telemetry.bind(model_name="smollm2")
    view.add("dynaxx_fallbacks_total", 2, reason="kernel failed")
    view.observe("dynaxx_attention_seconds", 0.02, backend="cpu", phase="prefill")
    view.set("dynaxx_kv_cache_bytes", 4096)
    found = collected(reader)
    (fallbacks,) = found["dynaxx.fallbacks"].data.data_points
    assert fallbacks.value == 2
    assert fallbacks.attributes == {"model_name": "smollm2", "engine": "0", "reason": "kernel failed"}
    (attention,) = found["dynaxx.attention_seconds"].data.data_points
    assert attention.explicit_bounds == CATALOG["dynaxx_attention_seconds"].buckets
    assert (attention.count, attention.sum) == (1, 0.02)
    assert found["dynaxx.attention_seconds"].unit == "s"
    assert (found["dynaxx.kv_cache_bytes"].unit, found["dynaxx.kill_switch"].data.data_points[0].value) == ("By", 1)
    telemetry.remove_sink(sink)
    view.add("dynaxx_fallbacks_total", reason="kernel failed")
    assert collected(reader)["dynaxx.fallbacks"].data.data_points[0].value == 2
    assert telemetry.value("dynaxx_telemetry_errors_total") == 0
    provider.shutdown()


def test_names_stay_apart():
    assert len({otel_name(metric)[0] for metric in CATALOG.values()}) == len(CATALOG)
