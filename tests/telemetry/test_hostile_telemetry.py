# SPDX-License-Identifier: Apache-2.0
"""Untrusted endpoints, snapshot files and clients: a watcher sees a problem, and never an outdated state for long."""

import contextlib
import http.client
import json
import logging
import os
import socket
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dynaxx.telemetry import Recorder
from dynaxx.telemetry import http as server_module
from dynaxx.telemetry.files import SnapshotFile, read_snapshot, read_snapshots, write_snapshot
from dynaxx.telemetry.http import Answer, HttpServer, is_loopback
from dynaxx.telemetry.overview import BackgroundWatch, Watch
from dynaxx.telemetry.snapshot import Snapshot
from dynaxx.telemetry.sources import parse_text, read_endpoint, read_files, source_of
from dynaxx.telemetry.store import MAX_SERIES, OTHER
from dynaxx.telemetry.web import WatchPage

pytest.importorskip("prometheus_client")
from dynaxx.telemetry import prometheus

GOOD = 'dynaxx_guard_level{engine="0",model_name="m"} 1.0\n'
EVIL = "\x1b]0;owned\x07\u202e"


@contextlib.contextmanager
def tcp_server(answer):
    """Send `answer` to every client. A list of answers is sent one by one, the last one repeatedly."""
    listening = socket.create_server(("127.0.0.1", 0))
    answers = list(answer) if isinstance(answer, list) else [answer]

    def run():
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with client:
                client.recv(1 << 16)
                client.sendall(answers.pop(0) if len(answers) > 1 else answers[0])

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
    finally:
        listening.close()


def reply(text, *, length=None):
    head = f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(text) if length is None else length}"
    return f"{head}\r\n\r\n{text}".encode()


ODD = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing": b"",
    "cut short": reply(GOOD, length=10_000),
    "cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFF\r\nabc",
    "odd chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "no metrics": reply("<html>"),
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 5000,
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/" + b"\x1b[2J" + b"\r\n\r\n",
    "server error": b"HTTP/1.1 500 " + b"\x1b[2J" + b"\r\n\r\n",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_odd_answer_is_a_problem_that_is_shown_and_gone_with_the_next_good_one(odd):
    with tcp_server([reply(GOOD), odd, reply(GOOD)]) as url:
        watch = Watch(source_of(url), url)
        assert watch.look().ok
        seen = watch.look()
        assert not seen.ok
        assert seen.guard_level == 1  # the last numbers
        assert "\x1b" not in seen.problem
        assert watch.look().ok


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), AssertionError("no"), MemoryError()])
def test_any_exception_of_a_reading_is_a_problem(error, telemetry):
    answers = [Snapshot.of(telemetry), error]

    def read():
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    watch = Watch(read, "here")
    watch.look()
    assert watch.look().concerns[0].text.startswith("cannot be read")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_number_that_is_not_finite_is_a_problem_and_the_others_stay(value, telemetry):
    text = GOOD + f'dynaxx_rollout_ratio{{engine="0",model_name="m"}} {value}\n'
    with tcp_server(reply(text)) as url, WatchPage(Watch(source_of(url), url), 0, 0.05) as page:
        seen = json.loads(urllib.request.urlopen(page.url + "state.json", timeout=10).read())
    assert seen["facts"]["in force"]["guard"] == "warns"
    assert seen["facts"]["in force"]["rollout"] == "-"
    assert "dynaxx_rollout_ratio" in seen["concerns"][0]["text"]


def test_sums_that_overflow_and_levels_that_no_guard_has_are_shown(telemetry):
    text = "".join(
        f'dynaxx_tokens_total{{engine="{e}",model_name="m",route="sparse"}} 1e308\n'
        f'dynaxx_guard_level{{engine="{e}",model_name="m"}} -7e300\n'
        f'dynaxx_layer_recall_ratio{{engine="{e}",model_name="m",layer="{"9" * 5000}"}} 1\n'
        f'dynaxx_layer_recall_ratio{{engine="{e}",model_name="m",layer="²"}} 1\n'
        for e in range(3)
    )
    found, faults = parse_text(text)
    assert not faults
    seen = Watch(lambda: Snapshot(found, 0.0), "here").look()
    json.dumps(seen.to_dict(), allow_nan=False)


def test_a_source_that_hangs_shows_its_age(telemetry, monkeypatch):
    monkeypatch.setattr("dynaxx.telemetry.overview.LATE_SECONDS", 0.05)
    hang, looked = threading.Event(), threading.Event()

    def read():
        if looked.is_set():
            hang.wait(30)
        looked.set()
        return Snapshot.of(telemetry)

    looking = BackgroundWatch(Watch(read, "here"), 0.01)
    try:
        deadline = time.monotonic() + 20
        while not looking.latest().age_seconds:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "s old" in looking.latest().concerns[0].text
        assert not looking.latest().ok
    finally:
        hang.set()
        looking.close()


def test_an_answer_that_drips_for_ever_ends(monkeypatch):
    monkeypatch.setattr("dynaxx.telemetry.sources.LONGEST", 0.3)

    class Drip(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(200):
                    self.wfile.write(b"#\n")
                    time.sleep(0.05)

        def log_message(self, *_):
            pass

    dripping = ThreadingHTTPServer(("127.0.0.1", 0), Drip)
    dripping.daemon_threads, dripping.block_on_close = True, False
    threading.Thread(target=dripping.serve_forever, daemon=True).start()
    try:
        with pytest.raises(OSError, match="takes longer"):
            read_endpoint(f"http://127.0.0.1:{dripping.server_port}/metrics")
    finally:
        dripping.shutdown()
        dripping.server_close()


def test_loopback_addresses_go_through_no_proxy(monkeypatch, telemetry):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    telemetry.set("dynaxx_guard_level", 2)
    with prometheus.serve(0) as server:
        for host in ("127.0.0.1", "localhost"):
            assert read_endpoint(f"http://{host}:{server.port}/metrics").gauge("dynaxx_guard_level") == 2


def test_loopback_addresses():
    for host in (
        "127.0.0.1",
        "127.8.9.1",
        "localhost",
        "LOCALHOST.",
        "::1",
        "[::1]",
        "a.localhost",
        "::ffff:127.0.0.1",
    ):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "127.0.0.1.evil.example", "localhost.evil.example", "", "2130706433"):
        assert not is_loopback(host), host


@pytest.mark.parametrize(
    "where", ["http://", "http://h:99999/", "http://a b/", "http://[::1", ":99999", "http://h/\x1b", "http://h/\ud800"]
)
def test_addresses_that_are_none_are_refused_at_once(where):
    with pytest.raises(ValueError, match="SOURCE must be") as caught:
        source_of(where)
    assert "\x1b" not in str(caught.value)


# ---- our own servers ---------------------------------------------------------------------------------------------


def ask(port, head, host="127.0.0.1"):
    with socket.create_connection((host, port), timeout=20) as client:
        client.sendall(head.encode())
        with contextlib.suppress(ConnectionError):
            return client.makefile("rb").read().decode("latin-1")
    return ""


@pytest.mark.parametrize("kind", ["metrics", "page"])
def test_only_its_own_address_is_answered(kind, telemetry):
    watch = Watch(lambda: Snapshot.of(telemetry), "here")
    with prometheus.serve(0) if kind == "metrics" else WatchPage(watch, 0, 60) as server:
        path = "/metrics" if kind == "metrics" else "/"
        for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
            assert "200 OK" in ask(server.port, f"GET {path} HTTP/1.0\r\nHost: {host}:{server.port}\r\n\r\n")
        for line in (
            f"Host: evil.example:{server.port}",
            "Host: 127.0.0.1",
            f"Host: localhost:{server.port}.evil",
            "X: y",
        ):
            answer = ask(server.port, f"GET {path} HTTP/1.0\r\n{line}\r\n\r\n")
            assert "403" in answer
            assert "dynaxx_" not in answer
        assert "404" in ask(server.port, f"GET /../etc/passwd HTTP/1.0\r\nHost: localhost:{server.port}\r\n\r\n")


def test_ipv6(telemetry):
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        server = prometheus.serve(0, host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback")
    with server:
        assert server.url == f"http://[::1]:{server.port}/metrics"
        assert "dynaxx_uptime_seconds" in urllib.request.urlopen(server.url, timeout=10).read().decode()


def test_bound_beyond_loopback_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="dynaxx"):
        HttpServer(lambda path: Answer(200, "text/plain", b"x"), 0, "127.0.0.1", "numbers").close()
        assert not caplog.records
        with HttpServer(lambda path: Answer(200, "text/plain", b"x"), 0, "0.0.0.0", "numbers") as server:
            assert "no password" in caplog.text
            assert "200 OK" in ask(server.port, "GET / HTTP/1.0\r\nHost: 192.0.2.7:80\r\n\r\n")


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_names_on_all_interfaces_are_this_machines(host, monkeypatch):
    """A page of a foreign name that resolves to this machine reads nothing."""
    monkeypatch.setenv("DYNAXX_HOSTS", "metrics, Node-7.example")
    own = ["192.0.2.7", "[2001:db8::1]", "localhost", socket.gethostname()] if host == "0.0.0.0" else []
    with HttpServer(lambda path: Answer(200, "text/plain", b"x"), 0, host, "numbers") as server:
        for name in ("metrics", "NODE-7.example.", *own):
            assert server.accepts(f"{name}:9100"), name
            assert server.accepts(name), name
        for name in ("evil.example", "metrics.evil.example", "192.0.2.7.evil.example", "2130706433", "[::1", "", "]"):
            assert not server.accepts(f"{name}:{server.port}"), name
        assert not server.accepts(None)


def test_idle_and_slow_clients_are_dropped_and_others_served(monkeypatch, capfd):
    monkeypatch.setattr(server_module, "CONNECTION_SECONDS", 0.5)
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    with HttpServer(lambda path: Answer(200, "text/plain", b"x" * (1 << 24)), 0, "127.0.0.1", "numbers") as server:
        head = f"GET / HTTP/1.0\r\nHost: localhost:{server.port}\r\n"
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(12)]
        idle[0].sendall(head.encode())  # begins a request, and reads nothing of the answer
        idle[1].sendall(b"GET /")
        deadline = time.monotonic() + 20
        while True:  # as soon as the idle ones are dropped
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = ask(server.port, head + "\r\n")
                if "200 OK" in answer:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for client in idle:
            client.close()
        gone = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        gone.sendall((head + "\r\n").encode())
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        gone.close()  # a reset in the middle of the answer
        time.sleep(0.2)
    printed = capfd.readouterr()
    assert not printed.out
    assert not printed.err


def test_an_answer_that_fails_is_a_500_and_logged(caplog):
    with HttpServer(lambda path: 1 / 0, 0, "127.0.0.1", "numbers") as server:
        assert "500" in ask(server.port, f"GET /{EVIL} HTTP/1.0\r\nHost: localhost:{server.port}\r\n\r\n")
    assert "ZeroDivisionError" in caplog.text
    assert "\x1b" not in caplog.text


# ---- files -------------------------------------------------------------------------------------------------------


def test_one_cut_snapshot_does_not_hide_the_others(tmp_path, telemetry):
    for index in range(2):
        numbers = Recorder(strict=True)
        numbers.add("dynaxx_requests_total", 3, route="sparse")
        SnapshotFile(tmp_path / f"{index}.json", interval=60, numbers=numbers).close()
    whole = (tmp_path / "0.json").read_text()
    (tmp_path / "cut.json").write_text(whole[: len(whole) // 2])
    os.mkfifo(tmp_path / "pipe.json")
    found = read_files(str(tmp_path))
    assert found.total("dynaxx_requests_total") == 6
    assert len(found.faults) == 2
    assert not Watch(source_of(str(tmp_path)), "here").look().ok
    with prometheus.serve_source(str(tmp_path), 0) as server:
        text = urllib.request.urlopen(server.url, timeout=10).read().decode()
    assert 'dynaxx_requests_total{engine="0",model_name="",route="sparse"} 6.0' in text
    assert 'what="snapshot file"} 2.0' in text
    (tmp_path / "0.json").unlink()
    (tmp_path / "1.json").unlink()
    with pytest.raises((ValueError, OSError), match=r"cut\.json"):
        read_snapshots(sorted(tmp_path.iterdir()))


@pytest.mark.parametrize(
    "change",
    [
        {"time": None},
        {"time": float("nan")},
        {"time": "1"},
        {"time": 10**400},
        {"events": {"a": 1}},
        {"events": [{"name": "x", "time": 1}]},
        {"events": [{"name": "x", "time": 1e300, "facts": {}}]},
        {"events": [{"name": ["x"], "time": 1, "facts": {}}]},
        {"metrics": []},
        {"metrics": {"dynaxx_guard_level": [{"labels": {"model_name": "", "engine": "0"}, "value": float("inf")}]}},
        {"metrics": {"dynaxx_guard_level": [{"labels": {"model_name": "", "engine": "0"}, "value": [1]}]}},
        {"metrics": {"dynaxx_guard_level": [{"labels": [], "value": 1}]}},
        {"metrics": {"dynaxx_guard_level": [[]]}},
        {"metrics": {"dynaxx_guard_level": 7}},
    ],
    ids=repr,
)
def test_odd_types_in_a_snapshot_are_one_error(change, tmp_path, telemetry):
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps({**Snapshot.of(telemetry).to_document(), **change}))
    with pytest.raises(ValueError, match=r"snapshot\.json is"):
        read_snapshot(path)


def test_text_of_a_snapshot_reaches_no_terminal_raw(tmp_path, telemetry):
    pytest.importorskip("rich")
    from dynaxx.telemetry.terminal import as_text

    document = Snapshot.of(telemetry).to_document()
    document["metrics"]["dynaxx_guard_level"] = [{"labels": {"model_name": EVIL * 100, "engine": EVIL}, "value": 1}]
    document["events"] = [{"name": EVIL, "time": 1, "facts": {EVIL: EVIL, "list": [1]}}]
    (tmp_path / "s.json").write_text(json.dumps(document))
    text = as_text(Watch(source_of(str(tmp_path / "s.json")), EVIL).look())
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_planted_links_are_not_followed(tmp_path, telemetry):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = tmp_path / "snapshot.json"
    for name in (f".{target.name}.{os.getpid()}.tmp", target.name):
        (tmp_path / name).symlink_to(victim)
    write_snapshot(target, Snapshot.of(telemetry))
    assert victim.read_text() == "precious"
    assert read_snapshot(target).total("dynaxx_requests_total") == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_file_alone(tmp_path, telemetry):
    file = SnapshotFile(tmp_path / "snapshot.json", interval=60)
    telemetry.add("dynaxx_requests_total", 3, route="sparse")
    assert file.write()
    child = os.fork()
    if not child:
        telemetry._store.restart()
        file.close()
        os._exit(int(telemetry.value("dynaxx_telemetry_errors_total", what="snapshot file") != 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_snapshot(file.path).total("dynaxx_requests_total") == 3
    file.close()


def test_models_that_come_and_go_do_not_eat_the_memory():
    numbers = Recorder(strict=False)
    for i in range(MAX_SERIES + 100):
        numbers.bind(model_name=f"model-{i}").add("dynaxx_requests_total", route="sparse")
    series = [s for s in numbers.snapshot() if s.metric.name == "dynaxx_requests_total"]
    assert len(series) == MAX_SERIES + 1
    assert numbers.value("dynaxx_requests_total", model_name=OTHER) == 100


def test_labels_are_what_every_exporter_can_say(telemetry):
    telemetry.bind(model_name="\ud800" + EVIL + "x" * 10_000).add("dynaxx_requests_total", route="sparse")
    with prometheus.serve(0) as server:
        text = urllib.request.urlopen(server.url, timeout=10).read().decode()
    assert "dynaxx_requests_total" in text
    assert "\x1b" not in text
