# SPDX-License-Identifier: Apache-2.0
"""Untrusted HTTP: after any bytes as an answer or as a request, watching and serving continue."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_mutations import check_words, run

from dynaxx.telemetry import Recorder
from dynaxx.telemetry.overview import Watch
from dynaxx.telemetry.sources import parse_text, source_of

pytest.importorskip("prometheus_client")
from dynaxx.telemetry import prometheus

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
GOOD = (
    '# TYPE dynaxx_guard_level gauge\ndynaxx_guard_level{engine="0",model_name="m"} 1.0\n'
    '# TYPE dynaxx_recall_ratio histogram\ndynaxx_recall_ratio_bucket{engine="0",model_name="m",le="0.5"} 1.0\n'
    'dynaxx_recall_ratio_bucket{engine="0",model_name="m",le="+Inf"} 3.0\n'
    'dynaxx_recall_ratio_sum{engine="0",model_name="m"} 2.5\ndynaxx_uptime_seconds{engine="0",model_name=""} 5\n'
)
LINES = (
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0 200 OK\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 302 F\r\nLocation: /\r\n",
    b"HTTP/9.9 999 \x1b[2J\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: -5\r\n",
    b"Content-Length: 99999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"\r\n",
    b"5\r\nabcde\r\n",
    b"ffffffffff\r\n",
    b"0\r\n\r\n",
    b"-1\r\n",
    b"X: " + b"y" * 70_000 + b"\r\n",
    b"\x00",
    GOOD.encode(),
    GOOD[:100].encode(),
    b'dynaxx_guard_level{engine="0",model_name="m"} NaN\n',
    b"{}{}{}",
)
REQUEST = (
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"/metrics",
    b"/",
    b"//",
    b"/%00",
    b"/state.json?x=1",
    b" HTTP/1.0",
    b" HTTP/1.1",
    b" HTTP/0.9",
    b" HTTP/99999999999999999999.1",
    b"\r\n",
    b"\r\n\r\n",
    b"Host: localhost:PORT",
    b"Host: evil",
    b"Host:",
    b"\x1b[2J",
    b"\x00",
    b"Content-Length: 99999999999\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: keep-alive\r\n",
    b"A: " + b"b" * 70_000,
    b"A: b\r\n" * 200,
)


def pieces(lines):
    return st.lists(st.sampled_from(lines) | st.binary(max_size=20), max_size=12).map(b"".join)


def test_answers_of_endpoints():
    answers = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(5)
                client.recv(1 << 16)
                client.sendall(answers.pop(0))

    threading.Thread(target=serve, daemon=True).start()
    good = b"HTTP/1.0 200 OK\r\n\r\n" + GOOD.encode()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"

    @given(pieces(LINES))
    def target(answer):
        answers[:] = [good, answer, good]
        watch = Watch(source_of(url), url)
        assert watch.look().guard_level == 1
        seen = watch.look()
        assert seen.guard_level in (0, 1, 2, 3)
        assert "\x1b" not in seen.problem
        assert not watch.look().problem

    try:
        run(target, 0.1)
    finally:
        listening.close()


def test_metrics_texts():
    pieces_of_text = st.lists(
        st.sampled_from(
            [*GOOD.splitlines(True), "dynaxx_", "{", "}", '"', "\\", "le=", "NaN", "1e999", " # ", "\x00", "\ud800"]
        )
        | st.text(max_size=10),
        max_size=20,
    ).map("".join)

    @given(pieces_of_text)
    def target(text):
        try:
            parse_text(text)
        except ValueError as error:
            check_words(error)

    run(target, 0.05)


def test_requests_to_the_metrics_endpoint(capfd):
    with prometheus.serve(0, numbers=Recorder()) as server:

        @given(pieces(REQUEST))
        def target(request):
            with contextlib.suppress(OSError):  # the server may have hung up already
                ask(request.replace(b"PORT", str(server.port).encode()))
            good = f"GET /metrics HTTP/1.0\r\nHost: localhost:{server.port}\r\n\r\n"
            assert b"dynaxx_uptime_seconds" in ask(good.encode())

        def ask(data):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                return client.makefile("rb").read()

        run(target, 0.1)
    printed = capfd.readouterr()
    assert not printed.out
    assert not printed.err
