# SPDX-License-Identifier: Apache-2.0
"""`dynaxx serve-metrics`: serve the metrics of running processes."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dynaxx.cli.running import echo, running

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
