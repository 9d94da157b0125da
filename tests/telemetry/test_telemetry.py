# SPDX-License-Identifier: Apache-2.0
"""The catalogue and the recorder; errors in counting never reach a request."""

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dynaxx.telemetry import CATALOG, EVENTS, Metric, Recorder, recorder, use
from dynaxx.telemetry.samples import CacheMeter
from dynaxx.telemetry.store import MAX_SERIES

CALLS = "dynaxx_layer_calls_total"


def test_names_follow_prometheus():
    units = ("_total", "_seconds", "_ratio", "_bytes", "_nats", "_info", "_level", "_switch", "_stale")
    for name, metric in CATALOG.items():
        assert name == metric.name
        assert name.endswith(units), name
        assert metric.help.endswith("."), name
        assert len(metric.labels) <= 3
    assert all(name == name.lower() and name.isidentifier() for name in EVENTS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "other_total", "kind": "counter"},
        {"name": "dynaxx_things", "kind": "counter"},
        {"name": "dynaxx_things_total", "kind": "gauge"},
        {"name": "dynaxx_seconds", "kind": "histogram"},
        {"name": "dynaxx_seconds", "kind": "histogram", "buckets": (2.0, 1.0)},
        {"name": "dynaxx_things", "kind": "gauge", "labels": ("engine",)},
    ],
)
def test_a_metric_that_breaks_the_rules_is_no_metric(wrong):
    with pytest.raises(AssertionError):
        Metric(help="x.", **wrong)


def test_counts_gauges_and_histograms(telemetry):
    telemetry.add(CALLS, backend="cpu", phase="prefill")
    telemetry.add(CALLS, 2, phase="prefill", backend="cpu")  # labels in any order
    telemetry.add(CALLS, backend="dense", phase="decode")
    telemetry.set("dynaxx_guard_level", 2)
    telemetry.set("dynaxx_guard_level", 1)
    for value in (0.05, 0.0501, 7.0):
        telemetry.observe("dynaxx_density_ratio", value, phase="prefill")
    assert telemetry.value(CALLS) == 4
    assert telemetry.value(CALLS, backend="cpu") == 3
    assert telemetry.value("dynaxx_guard_level") == 1
    (density,) = [s for s in telemetry.snapshot() if s.metric.name == "dynaxx_density_ratio"]
    assert density.counts[2:4] == [1, 1]  # a bound belongs to its bucket
    assert density.counts[-1] == 1
    assert density.sum == pytest.approx(7.1001)


def test_views_share_the_numbers(telemetry):
    view = telemetry.bind(model_name="smollm2", engine=1)
    view.add(CALLS, backend="cpu", phase="prefill")
    telemetry.add(CALLS, backend="cpu", phase="prefill")
    assert telemetry.value(CALLS) == 2
    assert view.value(CALLS, model_name="smollm2", engine="1") == 1
    with pytest.raises(ValueError, match="takes model_name, engine"):
        telemetry.bind(model="smollm2")


def test_an_info_replaces_the_one_before(telemetry):
    other = telemetry.bind(model_name="b")
    telemetry.info("dynaxx_policy_info", version="1", digest="aa")
    other.info("dynaxx_policy_info", version="1", digest="bb")
    telemetry.info("dynaxx_policy_info", version="2", digest="cc")
    found = {s.labels for s in telemetry.snapshot() if s.metric.kind == "info"}
    assert found == {("", "0", "2", "cc"), ("b", "0", "1", "bb")}
    telemetry.info("dynaxx_policy_info", version="1", digest="aa")  # and back
    assert telemetry.value("dynaxx_policy_info", model_name="") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.add("dynaxx_nothing_total"), "unknown metric"),
        (lambda r: r.add(CALLS, backend="cpu"), "has labels"),
        (lambda r: r.add(CALLS, backend="cpu", phase="prefill", layer=1), "has labels"),
        (lambda r: r.add(CALLS, -1, backend="cpu", phase="prefill"), "was given -1"),
        (lambda r: r.set(CALLS, 1, backend="cpu", phase="prefill"), "is a counter, not a gauge"),
        (lambda r: r.set("dynaxx_guard_level", math.nan), "was given nan"),
        (lambda r: r.observe("dynaxx_recall_ratio", math.inf), "was given inf"),
        (lambda r: r.observe("dynaxx_recall_ratio", "high"), "was given nan"),
        (lambda r: r.set("dynaxx_guard_level", 10**400), "was given nan"),
        (lambda r: r.event("dynaxx_happened"), "unknown event"),
        (lambda r: r.add(CALLS, backend=["cpu"], phase={}), None),
    ],
)
def test_wrong_use_raises_in_tests_and_is_counted_in_service(call, message, caplog):
    if message is not None:
        with pytest.raises(ValueError, match=message):
            call(Recorder(strict=True))
    lenient = Recorder(strict=False)
    call(lenient)
    call(lenient)
    assert lenient.value("dynaxx_telemetry_errors_total", what="wrong use") == (0 if message is None else 2)
    assert len([r for r in caplog.records if "logged once" in r.message]) == (0 if message is None else 1)


def test_series_are_bounded(telemetry):
    for reason in range(MAX_SERIES + 50):
        telemetry.add("dynaxx_dense_calls_total", reason=reason)
    found = [s for s in telemetry.snapshot() if s.metric.name == "dynaxx_dense_calls_total"]
    assert len(found) <= MAX_SERIES + 1
    assert telemetry.value("dynaxx_dense_calls_total") == MAX_SERIES + 50
    assert telemetry.value("dynaxx_dense_calls_total", reason="other") == 50


def test_threads_lose_nothing(telemetry):
    def work():
        for i in range(2000):
            telemetry.add(CALLS, backend="cpu", phase="prefill")
            telemetry.observe("dynaxx_attention_seconds", i * 1e-4, backend="cpu", phase="prefill")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert telemetry.value(CALLS) == telemetry.value("dynaxx_attention_seconds") == 16_000


def test_events_are_counted_and_remembered(telemetry, caplog):
    with caplog.at_level("INFO", logger="dynaxx"):
        telemetry.event("kernel_failed", layer=3)
    assert telemetry.value("dynaxx_events_total", event="kernel_failed") == 1
    (event,) = telemetry.events()
    assert (event.name, event.facts["layer"]) == ("kernel_failed", 3)
    assert "a kernel failed" in caplog.text


def test_a_storm_of_events_is_a_few_lines(telemetry, caplog, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with caplog.at_level("INFO", logger="dynaxx"):
        for _ in range(100):
            telemetry.event("kernel_failed", layer=1)
            now[0] += 0.15
        telemetry.event("drift_found", layer=1)
    assert telemetry.value("dynaxx_events_total", event="kernel_failed") == 100
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[1].endswith("(66 more since the last line)")


class BrokenSink:
    def update(self, metric, labels, value):
        raise RuntimeError("disk on fire")


def test_a_sink_sees_every_update_and_a_broken_one_is_counted(telemetry):
    class Sink:
        def __init__(self):
            self.seen = []

        def update(self, metric, labels, value):
            self.seen.append((metric.name, labels, value))

    good, bad = Sink(), BrokenSink()
    telemetry.add_sink(bad)
    telemetry.add_sink(good)
    telemetry.add(CALLS, 2, backend="cpu", phase="prefill")
    telemetry.remove_sink(good)
    telemetry.add(CALLS, backend="cpu", phase="prefill")
    assert good.seen == [(CALLS, ("", "0", "cpu", "prefill"), 2)]
    assert telemetry.value("dynaxx_telemetry_errors_total", what="sink") == 2


def test_a_source_that_fails_is_counted(telemetry):
    class Source:
        def flush(self):
            raise RuntimeError("no")

    source = Source()
    telemetry.add_source(source)
    telemetry.add(CALLS, backend="cpu", phase="prefill")
    assert telemetry.value(CALLS) == 1
    assert telemetry.value("dynaxx_telemetry_errors_total", what="source") >= 1


def test_there_is_one_default(telemetry):
    assert recorder() is telemetry
    with use(Recorder()) as inner:
        assert recorder() is inner
    assert recorder() is telemetry


def test_an_update_costs_microseconds(telemetry):
    """CPU time of this thread, the best of some: 1 us on a quiet machine."""

    def cost() -> float:
        start = time.thread_time()
        for _ in range(2000):
            telemetry.add(CALLS, backend="cpu", phase="prefill")
        return (time.thread_time() - start) / 2000

    assert min(cost() for _ in range(5)) < 10e-6


def test_the_memory_of_live_caches(telemetry):
    class Layer:
        def __init__(self, tokens):
            self.keys, self.values = (torch.zeros(1, 2, tokens, 16) for _ in range(2))

    class Cache:
        def __init__(self, tokens):
            self.layers = [Layer(tokens), object()]

    class Owner:
        def __init__(self):
            self.caches = [Cache(10), Cache(20), object()]

        def live(self):
            if self.caches is None:
                raise RuntimeError("dictionary changed size during iteration")
            return self.caches

    owner = Owner()
    meter = CacheMeter(telemetry, owner.live)
    assert telemetry.value("dynaxx_kv_cache_bytes") == 30 * 2 * 16 * 2 * 4
    owner.caches.pop()
    owner.caches.pop()
    assert telemetry.value("dynaxx_kv_cache_bytes") == 10 * 2 * 16 * 2 * 4
    owner.caches = None
    assert telemetry.value("dynaxx_kv_cache_bytes") == 10 * 2 * 16 * 2 * 4
    del owner
    meter.flush()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_starts_from_zero_even_while_a_thread_counts(telemetry):
    view = telemetry.bind(model_name="m")
    view.add(CALLS, 5, backend="cpu", phase="prefill")
    with ThreadPoolExecutor(1) as pool:  # another thread is in the middle of an update
        pool.submit(telemetry._store.lock.acquire).result()
        child = os.fork()
        if child:
            telemetry._store.lock.release()
    if child == 0:
        view.add(CALLS, backend="cpu", phase="prefill")
        os._exit(0 if telemetry.value(CALLS) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry.value(CALLS) == 5
