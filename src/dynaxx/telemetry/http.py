# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for untrusted clients: it checks the Host header, drops slow clients, and never prints.

The metrics endpoint and the watch page use it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple, Self

from dynaxx.forks import in_child, new_event, new_lock
from dynaxx.printable import printable

MAX_CONNECTIONS = 64  # concurrent connections; further ones are closed at once
CONNECTION_SECONDS = 15.0  # limit on sending a request and reading its response
HOSTS_VARIABLE = "DYNAXX_HOSTS"
SILENT_SECONDS = 5.0  # limit on the time without a byte from the client

logger = logging.getLogger("dynaxx")


class Answer(NamedTuple):
    """The response to a request."""

    status: int
    content_type: str
    body: bytes
    headers: dict[str, str] = {}  # noqa: RUF012  # never changed


Respond = Callable[[str], Answer]


class HttpServer:
    """Serve GET and HEAD requests in daemon threads until `close()`. Also a context manager.

    The server refuses requests whose Host header is not its own address. This prevents DNS rebinding, in which a
    foreign web page reads the responses through a name that resolves to this machine. A server on all interfaces
    accepts every address and this machine's name. `DYNAXX_HOSTS` lists further names, separated by commas.

    Args:
        respond: a function that returns the response for a path without its query. An exception is logged and becomes
            status 500.
        port: the port; 0 takes a free one, which the attribute `port` holds.
        host: the interface, as an address or name of this machine. Interfaces other than the loopback log a warning,
            because there is no password.
        what: a name for the content, for messages.

    Raises:
        ValueError: `port` is not between 0 and 65535.
        OSError: the port is taken or not allowed, or there is no such host; the message says which.
    """

    def __init__(self, respond: Respond, port: int, host: str, what: str) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"`port` must be between 0 and 65535 (0 takes a free one), got {port}")
        self._respond, self.host = respond, host
        try:
            self._server = _Server(self, port, host)
        except OSError as error:
            raise _explained(error, port, host) from None
        self.port = int(self._server.server_port)
        self._everywhere = host.strip("[]") in ("", "0.0.0.0", "::")
        self._own = _own_headers(host, self.port)
        self._names = {name.strip().lower() for name in os.environ.get(HOSTS_VARIABLE, "").split(",")} - {""}
        self._names |= {"localhost", socket.gethostname().lower()} if self._everywhere else set()
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.port}"
        self._closed = new_event()
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"dynaxx {what}", daemon=True)
        self._thread.start()
        in_child(self, HttpServer._leave_to_parent)
        if not is_loopback(host):
            logger.warning(
                "%s at %s can be read by everyone who can reach this address: there is no password", what, self.address
            )

    def accepts(self, host_header: str | None) -> bool:
        """Return whether requests with this Host header are served."""
        header = (host_header or "").lower()
        name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
        named = name.rstrip(".") in self._names or (self._everywhere and _is_address(name))
        return header in self._own or named

    def answer(self, path: str) -> Answer:
        """Return the response for a path."""
        try:
            return self._respond(path.partition("?")[0])
        except Exception:
            logger.exception("no response for %s", printable(path, most=100))
            return Answer(500, "text/plain; charset=utf-8", b"this went wrong; the log of the process says how\n")

    def wait(self) -> None:
        """Wait until the server is closed."""
        self._closed.wait()

    def close(self) -> None:
        """Stop. Further calls do nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _leave_to_parent(self) -> None:
        """Give up the port in a forked child, where no thread serves it."""
        self._server.socket.close()
        self._closed.set()

    def __enter__(self) -> Self:
        """Return the server. The end of the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()


def is_loopback(host: str) -> bool:
    """Return whether a host name or address belongs to the loopback interface."""
    host = host.strip("[]").partition("%")[0].lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


class _Server(ThreadingHTTPServer):
    """Limit the number and age of connections. Serves IPv4 or IPv6, depending on the host."""

    daemon_threads = True
    block_on_close = False  # slow clients must not delay the shutdown

    def __init__(self, owner: HttpServer, port: int, host: str) -> None:
        self.owner = owner
        self._open: dict[socket.socket, float] = {}  # start time of each connection
        self._lock = new_lock()
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:  # let "::" serve IPv4 as well
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)  # HTTPServer.server_bind would query the DNS
        self.server_name, self.server_port = self.owner.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            crowded = len(self._open) >= MAX_CONNECTIONS
            if not crowded:
                self._open[request] = time.monotonic()
        if crowded:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop clients that exceed the time limit. Called twice a second."""
        border = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            late = [request for request, began in self._open.items() if began < border]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # wakes the serving thread

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors at debug level only, since most are clients that disconnected."""
        logger.debug("a request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "dynaxx"
    sys_version = ""
    timeout = SILENT_SECONDS

    def do_GET(self) -> None:
        owner = self.server.owner
        if owner.accepts(self.headers.get("Host")):
            self._send(owner.answer(self.path))
        else:
            message = f"this is served under its own address only; {HOSTS_VARIABLE} lists more names\n".encode()
            self._send(Answer(403, "text/plain; charset=utf-8", message))

    do_HEAD = do_GET

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        head = {
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            **answer.headers,
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
        }
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, since the terminal shows the output of the command."""


def _own_headers(host: str, port: int) -> frozenset[str]:
    """Return the Host headers that name a server on one interface."""
    bare = host.strip("[]").lower()
    names = {bare, *(("127.0.0.1", "localhost", "::1") if is_loopback(bare) else ())}
    names = {f"[{name}]" if ":" in name else name for name in names}
    return frozenset({f"{name}:{port}" for name in names} | (names if port == 80 else set()))


def _is_address(name: str) -> bool:
    """Return whether a host is an address. A foreign page has a name, so its requests carry one."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _explained(error: OSError, port: int, host: str) -> OSError:
    """Return the same error with a message that says the fix."""
    if error.errno == errno.EADDRINUSE:
        message = f"port {port} on {host} is taken; choose another one, or 0 for a free one"
    elif error.errno == errno.EACCES:
        message = f"port {port} on {host} is not allowed; choose one from 1024 up"
    else:
        message = f"cannot serve on {host}:{port}: {error.strerror or error}; `host` must be an address of this machine"
    return OSError(error.errno, message)
