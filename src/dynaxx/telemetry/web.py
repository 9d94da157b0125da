# SPDX-License-Identifier: Apache-2.0
"""A web page of an overview, served by a small server on the loopback interface.

The server serves four files, and only for requests whose Host header is its own address. The page loads nothing from
outside.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from typing_extensions import override

from dynaxx.storage import strict_json
from dynaxx.telemetry.facts import about, facts, layer_cells, reasons
from dynaxx.telemetry.http import Answer, HttpServer
from dynaxx.telemetry.overview import RECALL_LOW, BackgroundWatch, Watch, describe_event

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class WatchPage(HttpServer):
    """Serve the page at `url` until `close()`. Also a context manager.

    Args:
        watch: the process to show.
        port: the port; 0 takes a free one.
        interval: seconds between two readings, independent of the number of browsers.
        host: the interface to serve on.

    Raises:
        OSError: the port is taken, or the first reading fails.
        ValueError: the first reading fails.
        ImportError: the first reading fails.
    """

    def __init__(self, watch: Watch, port: int, interval: float, *, host: str = "127.0.0.1") -> None:
        self._interval = interval
        self._watch = BackgroundWatch(watch, interval)
        try:
            super().__init__(self._file, port, host, "watch page")
        except BaseException:
            self._watch.close()
            raise
        self.url = f"{self.address}/"

    @override
    def close(self) -> None:
        super().close()
        self._watch.close()

    def _file(self, path: str) -> Answer:
        if path == "/state.json":
            body = json.dumps(strict_json(self._state()), allow_nan=False).encode()
            return Answer(200, "application/json", body, HEADERS)
        if path in FILES:
            name, kind = FILES[path]
            return Answer(200, kind, (files("dynaxx.telemetry") / "page" / name).read_bytes(), HEADERS)
        return Answer(404, "text/plain; charset=utf-8", b"there is nothing here\n", HEADERS)

    def _state(self) -> dict[str, Any]:
        """Return the data that the page draws, as text but for the curves."""
        seen, history = self._watch.latest(), self._watch.history
        cards = facts(seen)
        charts = (
            ("tokens", "traffic", "tokens_per_second", None),
            ("prefill p95", "traffic", "request_seconds_p95", None),
            ("density", "attention", "density", None),
            ("recall", "faithful", "recall", RECALL_LOW),
        )
        more = {"dense calls": seen.dense_calls, "fallbacks": seen.fallbacks}
        return {
            "interval": self._interval,
            "model": ", ".join(seen.models) or "a process",
            "about": about(seen),
            "concerns": [asdict(concern) for concern in seen.concerns],
            "charts": [
                {"title": title, "text": cards[card].pop(title), "values": [p[name] for p in history], "limit": limit}
                for title, card, name, limit in charts
            ],
            "facts": cards | {title: reasons(counts) for title, counts in more.items() if any(counts.values())},
            "layers": [layer_cells(one) for one in seen.layers],
            "events": [{"time": event["time"], "text": describe_event(event)} for event in seen.recent_events],
        }
