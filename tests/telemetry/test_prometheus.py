# SPDX-License-Identifier: Apache-2.0
"""Prometheus reads the metrics from dynaxx's endpoint, from another registry, and from several processes."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from dynaxx.telemetry import Recorder

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from dynaxx.telemetry import prometheus  # noqa: E402
from dynaxx.telemetry.prometheus import FOLDER  # noqa: E402


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)


def fill(numbers: Recorder) -> None:
    view = numbers.bind(model_name="smollm2")
    view.add("dynaxx_layer_calls_total", 3, backend="cpu", phase="prefill")
    view.set("dynaxx_guard_level", 1)
    view.info("dynaxx_policy_info", version="1", digest="abc")
    for value in (0.0005, 0.001, 99.0):
        view.observe("dynaxx_attention_seconds", value, backend="cpu", phase="prefill")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[str, float]:
    """Return the samples by name and by the labels that dynaxx sets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


EXPECTED = {
    "dynaxx_layer_calls_total{backend=cpu,phase=prefill}": 3,
    "dynaxx_guard_level{}": 1,
    "dynaxx_policy_info{digest=abc,version=1}": 1,
    "dynaxx_attention_seconds_count{backend=cpu,phase=prefill}": 3,
    "dynaxx_attention_seconds_bucket{backend=cpu,le=0.001,phase=prefill}": 2,
    "dynaxx_attention_seconds_bucket{backend=cpu,le=10.0,phase=prefill}": 2,
    "dynaxx_attention_seconds_bucket{backend=cpu,le=+Inf,phase=prefill}": 3,
    "dynaxx_attention_seconds_sum{backend=cpu,phase=prefill}": 99.0015,
}


def test_an_endpoint_on_the_loopback_interface(telemetry):
    fill(telemetry)
    with prometheus.serve(0) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        text = fetch(server.url)
        found = samples(text)
        assert {name: found[name] for name in EXPECTED} == pytest.approx(EXPECTED)
        assert 'dynaxx_guard_level{engine="0",model_name="smollm2"} 1.0' in text
        telemetry.bind(model_name="smollm2").add("dynaxx_layer_calls_total", backend="cpu", phase="prefill")
        assert samples(fetch(server.url))["dynaxx_layer_calls_total{backend=cpu,phase=prefill}"] == 4
    server.close()
    with pytest.raises(urllib.error.URLError):
        fetch(server.url)


def test_it_listens_nowhere_else(telemetry):
    others = [a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    others = [address for address in others if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has one interface")
    with prometheus.serve(0) as server, pytest.raises(OSError, match="refused"):
        socket.create_connection((others[0], server.port), timeout=5)


def test_a_port_that_is_taken_and_others_that_are_none(telemetry):
    with prometheus.serve(0) as server, pytest.raises(OSError, match=f"port {server.port} on 127.0.0.1 is taken"):
        prometheus.serve(server.port)
    with pytest.raises(ValueError, match="between 0 and 65535"):
        prometheus.serve(65536)
    with pytest.raises(OSError, match="address of this machine"):
        prometheus.serve(0, host="203.0.113.7")


def test_into_a_registry_that_is_there(telemetry):
    fill(telemetry)
    registry = prometheus_client.CollectorRegistry()
    own = prometheus_client.Counter("requests", "Of the server.", registry=registry)
    own.inc()
    prometheus.register(registry)
    prometheus.register(registry)
    found = samples(prometheus_client.generate_latest(registry).decode())
    assert found["requests_total{}"] == 1
    assert {name: found[name] for name in EXPECTED} == pytest.approx(EXPECTED)


WORKER = """
import json, os, sys
from dynaxx.telemetry import Recorder, recorder
from dynaxx.telemetry import prometheus
numbers = recorder().bind(model_name="m")
numbers.set("dynaxx_kv_cache_bytes", 5)          # before: taken over
numbers.add("dynaxx_fallbacks_total", reason="kernel failed")
prometheus.register(); prometheus.register()
numbers.add("dynaxx_fallbacks_total", int(sys.argv[1]), reason="kernel failed")
numbers.observe("dynaxx_recall_ratio", 0.96)
numbers.set("dynaxx_guard_level", int(sys.argv[1]))
numbers.info("dynaxx_policy_info", version="1", digest="old")
numbers.info("dynaxx_policy_info", version="1", digest="new")
print(numbers.value("dynaxx_telemetry_errors_total"), flush=True)
sys.stdin.readline()
"""


def test_several_processes_through_a_folder(tmp_path):
    env = {**os.environ, FOLDER: str(tmp_path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, n], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for n in ("1", "2")
    ]
    try:
        assert [worker.stdout.readline().strip() for worker in workers] == ["0.0", "0.0"]
        code = (
            "import json, urllib.request; from dynaxx.telemetry import prometheus; server = prometheus.serve(0);"
            "print(json.dumps(urllib.request.urlopen(server.url).read().decode()))"
        )
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    finally:
        for worker in workers:
            worker.communicate("done\n", timeout=60)
    found = samples(json.loads(done.stdout))
    assert found["dynaxx_fallbacks_total{reason=kernel failed}"] == 5
    assert found["dynaxx_kv_cache_bytes{}"] == 10
    assert found["dynaxx_guard_level{}"] == 2
    assert found["dynaxx_recall_ratio_bucket{le=0.97}"] == 2
    assert found["dynaxx_policy_info{digest=new,version=1}"] == 1
    assert found["dynaxx_policy_info{digest=old,version=1}"] == 0
    with prometheus.serve_source(str(tmp_path), 0) as server:  # what they left, as `dynaxx serve-metrics` shows it
        assert samples(fetch(server.url))["dynaxx_fallbacks_total{reason=kernel failed}"] == 5


def test_a_folder_that_cannot_be_used_is_refused(telemetry, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "no"))
    with pytest.raises(ValueError, match="must be a writable folder"):
        prometheus.register()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(ValueError, match="set after prometheus_client was imported"):
        prometheus.serve(0)
