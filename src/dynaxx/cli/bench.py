# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench`: test kernels, then time them."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption, QuietOption, SeedOption, ThreadsOption, device_of
from dynaxx.cli.running import check_targets, running


class Suite(StrEnum):
    """Benchmark suites."""

    cpu = "cpu"
    gpu = "gpu"


def bench(
    suite: Annotated[Suite, typer.Option(help="Which kernels.")] = Suite.cpu,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller shapes.")] = False,
    threads: ThreadsOption = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="ROWS", help="Only rows whose name starts with one of these, separated by commas."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers", metavar="NAMES", help="GPU: only peers whose name starts with one of these, separated by commas."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the figures as JSON.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Test the kernels, then time them beside dense attention.

    A kernel that fails its test is not timed, and gives exit code 1.

    \b
    Examples:
      dynaxx bench --suite cpu --quick
      dynaxx bench --suite cpu --only "window 512,decode"
      dynaxx bench --suite gpu --only window --out gpu.json
      dynaxx bench --suite gpu --peers flex
    """
    stdout = sys.stdout  # rows are printed as they are measured

    def say(line: str) -> None:
        if not (as_json and quiet):
            print(line, file=sys.stderr if as_json else stdout, flush=True)

    with running(as_json, threads, seed) as finish:
        from dynaxx.lab.files import write_json
        from dynaxx.lab.progress import LineProgress, SilentProgress

        if suite is not Suite.gpu and peers:
            raise typer.BadParameter("--peers needs --suite gpu")
        device_of("cuda" if suite is Suite.gpu else "cpu")
        check_targets(out)
        try:
            split = lambda names: [name.strip() for name in names.split(",")]
            rows, against = split(only) if only else [], split(peers) if peers else None
            if suite is Suite.cpu:
                from dynaxx.lab.bench.cpu import run_cpu_suite

                with (SilentProgress() if quiet else LineProgress()).task("Testing and timing CPU kernels") as task:
                    beat = lambda note: task.advance(0, note)
                    found = run_cpu_suite(quick=quick, threads=threads, seed=seed, only=rows, progress=say, beat=beat)
            else:
                from dynaxx.lab.bench.gpu import run_gpu_suite

                found = run_gpu_suite(quick=quick, seed=seed, only=rows, peers=against, progress=say)
        except RuntimeError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        finish(found, ok=True, write=[lambda: write_json(out, found)] if out else [])
