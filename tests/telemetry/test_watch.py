# SPDX-License-Identifier: Apache-2.0
"""`dynaxx watch` shows what a process counted, in a terminal, as JSON and on a page."""

import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dynaxx.telemetry import Recorder, files
from dynaxx.telemetry.overview import MAX_HISTORY, SILENT_AFTER, Concern, LayerEstimates, Overview, Watch, concerns_of
from dynaxx.telemetry.snapshot import Snapshot
from dynaxx.telemetry.sources import parse_text, read_endpoint, source_of
from dynaxx.telemetry.web import WatchPage

pytest.importorskip("rich")
pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner

from dynaxx.telemetry import terminal
from dynaxx.telemetry.facts import duration, number
from dynaxx.telemetry.terminal import as_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def serve_some(numbers: Recorder, *, recall: float = 0.96) -> None:
    """Some traffic of a model."""
    view = numbers.bind(model_name="smollm2")
    for layer in range(3):
        view.add("dynaxx_layer_calls_total", 10, backend="cpu", phase="prefill")
        view.set("dynaxx_layer_recall_ratio", recall + layer * 0.01, layer=layer)
        view.set("dynaxx_layer_density_ratio", 0.1, layer=layer)
    view.add("dynaxx_requests_total", 2, route="sparse")
    view.add("dynaxx_requests_total", 6, route="dense")
    view.add("dynaxx_tokens_total", 8000, route="sparse")
    view.observe("dynaxx_recall_ratio", recall)
    view.observe("dynaxx_request_seconds", 0.9, route="sparse")
    view.observe("dynaxx_attention_seconds", 0.03, backend="cpu", phase="prefill")
    view.observe("dynaxx_selection_seconds", 0.01, backend="cpu", phase="prefill")
    view.add("dynaxx_attention_flops_total", 3e9, backend="cpu", phase="prefill")
    view.info("dynaxx_policy_info", version="1", digest="9f1c0ab3d2e4")
    view.set("dynaxx_rollout_ratio", 0.25)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watch_of(numbers: Recorder, **options) -> Watch:
    return Watch(lambda: Snapshot.of(numbers), "here", **options)


def test_rates_are_of_the_window_and_means_of_what_came_in_it(telemetry, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(Recorder, "uptime", property(lambda self: clock.now))
    serve_some(telemetry, recall=0.5)
    watch = watch_of(telemetry, window=10, clock=clock)
    watch.look()
    clock.now += 10
    serve_some(telemetry, recall=0.96)
    seen = watch.look()
    assert seen.window_seconds == 10
    assert seen.requests_per_second == {"sparse": 0.2, "dense": 0.6}
    assert seen.tokens_per_second == {"sparse": 800}
    assert seen.recall == pytest.approx(0.96)
    assert seen.calls == {"cpu": 30}
    assert seen.selection_share == pytest.approx(0.25)
    assert seen.flops_per_second == pytest.approx(1e11)
    assert seen.layers[2] == LayerEstimates(2, 0.1, 0.98, None, None)
    assert seen.policy["digest"] == "9f1c0ab3d2e4"
    assert seen.ok
    clock.now += 10
    quiet = watch.look()
    assert quiet.requests_per_second == {"sparse": 0, "dense": 0}
    assert quiet.recall == pytest.approx(0.73)  # nothing came: the whole run's


def test_a_process_that_begins_anew_gives_no_negative_rates(telemetry):
    clock, numbers = Clock(), [telemetry]
    watch = Watch(lambda: Snapshot.of(numbers[-1]), "here", clock=clock)
    serve_some(telemetry)
    serve_some(telemetry)
    watch.look()
    numbers.append(Recorder(strict=True))
    serve_some(numbers[-1])
    clock.now += 5
    assert watch.look().calls == {"cpu": 30}


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, None, ""),
        ({"recall": 0.89}, "bad", "recall is 89.0 %, below 90.0 %"),
        ({"recall": 0.9}, None, ""),
        ({"output_error": 0.2}, "bad", "output error is 20.0 %"),
        ({"fallback_share": 0.02}, "bad", "2.0 % of calls fall back"),
        ({"guard_level": 3}, "bad", "the guard runs everything dense"),
        ({"problem": "x does not answer"}, "bad", "cannot be read: x does not answer"),
        ({"silent_seconds": SILENT_AFTER + 1}, "bad", "no change for 31 s"),
        ({"guard_level": 2}, "warn", "the guard widened the budget"),
        ({"kill_switch": True}, "bad", "the kill switch is on, so everything runs dense"),
        ({"kill_switch": True, "killed_by": "file"}, "bad", "the kill switch is on (file), so"),
        ({"policy": {"stale": True}}, "warn", "policy file was refused"),
        ({"drift": 1.0}, "warn", "drifted"),
        ({"telemetry_errors": {"sink": 1}}, "warn", "telemetry had errors: sink"),
    ],
)
def test_concerns(change, level, words):
    found = concerns_of(Overview("here", **change))
    assert [concern.level for concern in found] == ([level] if level else [])
    assert not words or words in found[0].text


def test_the_kill_switch_comes_first_with_its_reason(telemetry):
    telemetry.set("dynaxx_kill_switch", True)
    telemetry.set("dynaxx_guard_level", 3)
    telemetry.event("kill_switch_on", reason="file")
    seen = watch_of(telemetry).look()
    assert seen.concerns[0] == Concern("bad", "the kill switch is on (file), so everything runs dense")
    assert len(seen.concerns) == 2
    assert "on file" in as_text(seen)
    telemetry.set("dynaxx_kill_switch", False)
    telemetry.event("kill_switch_off", reason="file")
    assert not watch_of(telemetry).look().killed_by


def test_a_reading_that_fails_later_keeps_the_numbers_and_says_so(telemetry, tmp_path):
    path = tmp_path / "snapshot.json"
    serve_some(telemetry)
    files.write_snapshot(path, Snapshot.of(telemetry))
    clock = Clock()
    watch = Watch(source_of(str(path)), str(path), clock=clock)
    assert watch.look().ok
    clock.now += SILENT_AFTER + 5
    assert "no change for 35 s" in watch.look().concerns[0].text
    path.write_text("{")
    seen = watch.look()
    assert "is not JSON" in seen.problem
    assert seen.recall == pytest.approx(0.96)
    assert not seen.ok


def test_a_file_from_the_past_is_silent_at_once_and_one_from_the_future_is_not(telemetry, tmp_path):
    path = tmp_path / "snapshot.json"
    document = Snapshot.of(telemetry).to_document()
    for shift, silent in ((-3600, True), (3600, False)):
        path.write_text(json.dumps({**document, "time": time.time() + shift}))
        assert (Watch(source_of(str(path)), "it").look().silent_seconds > SILENT_AFTER) is silent


def test_history_is_bounded(telemetry):
    watch = watch_of(telemetry)
    for _ in range(MAX_HISTORY + 10):
        watch.look()
    assert len(watch.history) == MAX_HISTORY


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_an_endpoint_says_what_the_process_counted(telemetry):
    prometheus = pytest.importorskip("dynaxx.telemetry.prometheus")
    serve_some(telemetry)
    with prometheus.serve(0) as server:
        for where in (server.url, f":{server.port}", f"localhost:{server.port}"):
            seen = source_of(where)()
            assert seen.readings == Snapshot.of(telemetry).readings
            assert 0 < seen.uptime <= telemetry.uptime
        with pytest.raises(OSError, match="does not respond"):
            read_endpoint(f"http://127.0.0.1:{server.port}0/metrics")


def test_wrong_sources_are_named(tmp_path):
    pytest.importorskip("prometheus_client")
    with pytest.raises(ValueError, match="SOURCE must be"):
        source_of("ftp://host/file")
    with pytest.raises(ValueError, match="SOURCE must be"):
        source_of("")
    with pytest.raises(ValueError, match="does not exist"):
        source_of(str(tmp_path / "no.json"))()
    with pytest.raises(ValueError, match="matches no snapshot file"):
        source_of(str(tmp_path))()
    for text in ("{'json': 1}", "dynaxx_guard_level{", 'dynaxx_guard_level{engine="0",model_name=""} x'):
        with pytest.raises(ValueError, match="not in Prometheus's text format"):
            parse_text(text)
    assert parse_text("") == ({}, ())
    assert parse_text('dynaxx_guard_level{engine="0"} 1\nother_total 5\n') == ({}, ())


# ---- the terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.00123, "1.23 ms"), (0.9, "900 ms"), (12, "12 s"), (75, "1 min 15 s"), (3725, "1 h 02 min")],
)
def test_durations(value, text):
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0"), (0.25, "0.25"), (999.6, "1000"), (1234567, "1.23 M"), (2e13, "20 T")]
)
def test_numbers(value, text):
    assert number(value) == text


def test_the_terminal_shows_it_all_in_80_columns(telemetry):
    serve_some(telemetry, recall=0.8)
    telemetry.event("kernel_failed", layer=2)
    telemetry.add("dynaxx_dense_calls_total", 4, reason="below dense_below")
    text = as_text(watch_of(telemetry).look(), width=80)
    for words in ("smollm2", "recall is 80.0 %", "25.0 %", "9f1c0ab3d2e4", "100 GFLOP/s", "a kernel failed", "layer"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    assert as_text(watch_of(Recorder()).look(), width=80)  # a process that has not begun


def test_the_terminal_draws_again_until_ctrl_c(telemetry):
    serve_some(telemetry)
    console = Console(width=90, height=40, force_terminal=True, file=io.StringIO())
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        terminal.run(watch_of(telemetry), 0.5, console, sleep=sleep)
    assert looks == [0.5] * 3
    assert "no concerns" in console.file.getvalue()


# ---- the command -----------------------------------------------------------------------------------------------------


def dynaxx(*arguments: str):
    return CliRunner().invoke(importlib.import_module("dynaxx.cli").app, arguments)


def test_the_command_looks_once_where_there_is_no_terminal(telemetry, tmp_path):
    path = tmp_path / "snapshot.json"
    serve_some(telemetry)
    files.write_snapshot(path, Snapshot.of(telemetry))
    good = dynaxx("watch", str(path), "--json")
    assert good.exit_code == 0, good.output
    assert json.loads(good.stdout)["recall"] == pytest.approx(0.96)
    serve_some(telemetry, recall=0.5)
    files.write_snapshot(path, Snapshot.of(telemetry))
    bad = dynaxx("watch", str(path))
    assert bad.exit_code == 1
    assert "recall is 73.0 %" in bad.stdout
    for wrong, words in (
        (("watch", str(tmp_path / "no.json")), "does not exist"),
        (("watch", str(path), "--web", "--json"), "remove --json and --once"),
        (("watch", "ftp://x"), "SOURCE must be"),
        (("serve-metrics",), "SOURCE must be given"),
        (("serve-metrics", str(path), "--host", "203.0.113.7", "--port", "0"), "address of this machine"),
    ):
        refused = dynaxx(*wrong)
        assert refused.exit_code == 2
        assert words in refused.stderr
    assert "Examples:" in dynaxx("watch", "--help").stdout


def test_serve_metrics_serves_a_snapshot_file_and_notices_when_it_goes(telemetry, tmp_path):
    prometheus = pytest.importorskip("dynaxx.telemetry.prometheus")
    path = tmp_path / "snapshot.json"
    serve_some(telemetry)
    files.write_snapshot(path, Snapshot.of(telemetry))
    with prometheus.serve_source(str(path), 0) as server:
        found = read_endpoint(server.url).readings
        assert {n: r for n, r in found.items() if "snapshot" not in n} == Snapshot.of(telemetry).readings
        assert found["dynaxx_snapshot_timestamp_seconds"][0].value == pytest.approx(time.time(), abs=60)
        path.unlink()
        found = read_endpoint(server.url).readings
        assert found["dynaxx_telemetry_errors_total"][0].labels["what"] == "snapshot file"
    with pytest.raises(ValueError, match="does not exist"):
        prometheus.serve_source(str(path), 0)
    with pytest.raises(ValueError, match="start what writes"):
        prometheus.serve_source(str(tmp_path), 0)


def start(*arguments: str) -> tuple[subprocess.Popen, str]:
    """Start a command that serves; return the URL that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dynaxx", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits that it is ignored
    )
    said = process.stderr.readline()
    found = re.search(r"http://\S+", said)
    if not found:
        process.kill()
        raise AssertionError(said + process.stderr.read())
    return process, found[0]


def stop(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(30)
    finally:
        process.kill()  # nothing, where it has ended
        process.stderr.close()


def test_serve_metrics_and_the_page_end_with_ctrl_c(telemetry, tmp_path):
    pytest.importorskip("prometheus_client")
    path = tmp_path / "snapshot.json"
    serve_some(telemetry)
    files.write_snapshot(path, Snapshot.of(telemetry))
    commands = (("serve-metrics", str(path), "--port", "0"), ("watch", str(path), "--web", "--port", "0"))
    for process, url in [start(*command) for command in commands]:
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
        assert stop(process) == 0


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(telemetry):
    serve_some(telemetry)
    telemetry.event("kernel_failed", backend="<script>alert(1)</script>")
    with WatchPage(watch_of(telemetry), 0, 0.1) as page:
        yield page


def get(url: str, **headers: str):
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10)


def test_the_page_loads_nothing_from_outside(page):
    for name in ("", "watch.css", "watch.js", "state.json"):
        with get(page.url + name) as answer:
            text = answer.read().decode()
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        outside = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside
        assert "innerHTML" not in text
    assert page.host == "127.0.0.1"


def test_the_page_says_what_the_terminal_says(page, telemetry):
    with get(page.url + "state.json") as answer:
        state = json.load(answer)
    said = as_text(watch_of(telemetry).look())
    charts = {one["title"]: one["text"] for one in state["charts"]}
    assert charts["recall"] == "96.0 %"
    for facts in (charts, *state["facts"].values()):
        assert all(name in said and value.split()[-1] in said for name, value in facts.items())
    assert [cell for cell, _ in state["layers"][0]] == ["0", "10.0 %", "96.0 %", "-", "-"]


def test_the_page_answers_its_own_address_and_its_own_files_only(page):
    for name, headers, status in (
        ("state.json", {"Host": f"evil.example:{page.port}"}, 403),
        ("../../../../etc/passwd", {}, 404),
        ("nothing", {}, 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(page.url + name, **headers)
        assert caught.value.code == status
        caught.value.close()
    with get(page.url, Host=f"localhost:{page.port}") as answer:
        assert answer.status == 200
    request = urllib.request.Request(page.url, data=b"x")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 501
    caught.value.close()


def test_the_page_goes_on_and_a_port_that_is_taken_is_said(page, telemetry):
    def digest() -> str:
        with get(page.url + "state.json") as answer:
            return json.load(answer)["facts"]["in force"]["policy"]

    telemetry.bind(model_name="smollm2").info("dynaxx_policy_info", version="1", digest="new")
    end = time.monotonic() + 10
    while digest() != "new":
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(OSError, match=f"port {page.port} on 127.0.0.1 is taken"):
        WatchPage(watch_of(telemetry), page.port, 1)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "height"), [(1280, 1200), (390, 1600)])
def test_the_page_in_a_browser(page, tmp_path, width, height):
    picture = Path(os.environ.get("DYNAXX_PICTURES", tmp_path)) / f"watch-{width}.png"
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path}",
            f"--window-size={width},{height}",
            "--virtual-time-budget=3000",
            f"--screenshot={picture}",
            "--dump-dom",
            page.url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    for words in ("smollm2", "no concerns", "25.0 %", "96.0 %", "9f1c0ab3d2e4", "100 GFLOP/s"):
        assert words in done.stdout, words
    assert "&lt;script&gt;alert(1)" in done.stdout
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 10_000
