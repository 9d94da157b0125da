# SPDX-License-Identifier: Apache-2.0
"""`dynaxx watch`: show a running process."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import echo, running


def watch(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="URL, host:port or :port of a metrics endpoint, or a snapshot file."),
    ],
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two readings.")] = 2.0,
    window: Annotated[float, typer.Option("--window", min=1, help="Seconds over which rates are computed.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Read once, print and exit.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Show a web page instead.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 9467,
    host: HostOption = "127.0.0.1",
    as_json: JsonOption = False,
) -> None:
    r"""Watch a running process until Ctrl-C.

    Shows traffic, density, speed, recall, drift and the policy in use.

    Reads once with --once or --json, or if stdout is not a terminal. The exit code is then 1 if an alert is active.

    \b
    Examples:
      dynaxx watch :9466
      dynaxx watch snapshot.json --web
      dynaxx watch http://server:8000/metrics --json | jq .recall
    """
    stdout = sys.stdout
    with running(as_json) as finish:
        from dynaxx.telemetry.overview import Watch
        from dynaxx.telemetry.sources import source_of

        looking = Watch(source_of(source), source, window=window)
        if web and (as_json or once):
            raise ValueError("--web runs until Ctrl-C; remove --json and --once")
        if as_json or once or not (web or stdout.isatty()):
            seen = looking.look()
            if not as_json:
                from dynaxx.telemetry.terminal import as_text
            finish(seen, "" if as_json else as_text(seen), ok=seen.ok)
            return
        with contextlib.suppress(KeyboardInterrupt):
            if web:
                from dynaxx.telemetry.web import WatchPage

                with WatchPage(looking, port, interval, host=host) as page:
                    echo(f"watch it at {page.url} (press Ctrl-C to stop)", err=True)
                    page.wait()
            else:
                from rich.console import Console

                from dynaxx.telemetry.terminal import run

                run(looking, interval, Console(file=stdout))


HostOption = Annotated[
    str,
    typer.Option(
        "--host", help="Interface to serve on. There is no password: everyone who can reach it can read the metrics."
    ),
]


def serve_metrics(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A snapshot file, a folder or glob pattern of them, or a PROMETHEUS_MULTIPROC_DIR (the default).",
        ),
    ] = "",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 9466,
    host: HostOption = "127.0.0.1",
) -> None:
    r"""Serve the metrics of other processes to Prometheus.

    Use it for processes that cannot serve their own metrics. It reads their snapshot files, or the folder that
    PROMETHEUS_MULTIPROC_DIR names. A process that can serve calls dynaxx.telemetry.prometheus.serve() itself.

    \b
    Examples:
      dynaxx serve-metrics snapshot.json
      dynaxx serve-metrics '/var/run/dynaxx/*.json' --port 9100
      PROMETHEUS_MULTIPROC_DIR=/var/run/workers dynaxx serve-metrics
    """
    with running(False) as finish:
        from dynaxx.forks import new_event
        from dynaxx.telemetry.prometheus import serve_source

        where = source or os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
        if not where:
            raise ValueError("SOURCE must be given if PROMETHEUS_MULTIPROC_DIR is not set")
        with serve_source(where, port, host=host) as server:
            echo(f"metrics of {where} at {server.url} (press Ctrl-C to stop)", err=True)
            try:
                new_event().wait()
            except KeyboardInterrupt:
                finish({})
