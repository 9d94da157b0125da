"""A local web page of an overview: one small server of the standard library, on the loopback interface.

It serves four files and nothing else, to requests that name it by its own address. The page loads nothing from outside.
"""

from __future__ import annotations

import errno
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from dynaxx.telemetry.overview import Overview, Watch, describe_event

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class WatchPage:
    """Serves the page at `url` until `close()`.

    Args:
        interval: seconds between two readings, however many browsers look.

    Raises:
        OSError: the port is taken; the message says so.
    """

    def __init__(self, watch: Watch, port: int, interval: float, *, host: str = "127.0.0.1") -> None:
        self._watch, self._interval = watch, interval
        self._answer = self._read()
        self._lock = threading.Lock()
        page = self

        class Handler(_Handler):
            owner = page

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            message = f"port {port} on {host} is taken: choose another one, or 0 for a free one"
            raise OSError(errno.EADDRINUSE, message) from None
        self._server.daemon_threads = True
        self.host, self.port = host, self._server.server_port
        self.hosts = {f"{name}:{self.port}" for name in {host, *(LOOPBACK if host in LOOPBACK else ())}}
        self.url = f"http://{host}:{self.port}/"
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, name="dynaxx watch page", daemon=True),
            threading.Thread(target=self._keep_reading, name="dynaxx watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def answer(self) -> bytes:
        """What the page asks for."""
        with self._lock:
            return self._answer

    def wait(self) -> None:
        """Wait until somebody closes the page."""
        self._closed.wait()

    def close(self) -> None:
        """Stop. More calls do nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> WatchPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_reading(self) -> None:
        while not self._closed.wait(self._interval):
            answer = self._read()
            with self._lock:
                self._answer = answer

    def _read(self) -> bytes:
        seen = self._watch.look()
        return json.dumps(state(seen, self._watch, self._interval), allow_nan=False).encode()


def state(seen: Overview, watch: Watch, interval: float) -> dict[str, Any]:
    """What the page draws."""
    events = [{"time": event["time"], "text": describe_event(event)} for event in seen.recent_events]
    return {"overview": seen.to_dict(), "events": events, "history": list(watch.history), "interval": interval}


class _Handler(BaseHTTPRequestHandler):
    owner: WatchPage
    server_version = "dynaxx"
    sys_version = ""
    timeout = 10  # seconds that a client may take to say what it wants

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.owner.hosts and not self._any_host():
            self._send(403, "text/plain; charset=utf-8", b"this page is served under its own address only\n")
        elif self.path == "/state.json":
            self._send(200, "application/json", self.owner.answer)
        elif self.path in FILES:
            name, kind = FILES[self.path]
            self._send(200, kind, (files("dynaxx.telemetry") / "page" / name).read_bytes())
        else:
            self._send(404, "text/plain; charset=utf-8", b"there is nothing here\n")

    do_HEAD = do_GET

    def _any_host(self) -> bool:
        """Whether the page was put on all interfaces, whose names nobody knows."""
        return self.owner.host in ("0.0.0.0", "::")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the command."""
