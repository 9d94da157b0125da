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
    sample: Annotated[
        int, typer.Option(min=0, metavar="N", help="GPU: N random problems of the sizes that models have, by --seed.")
    ] = 0,
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
      dynaxx bench --suite gpu --peers fa4,cudnn --sample 40
    """
    stdout = sys.stdout  # rows are printed as they are measured

    def say(line: str) -> None:
        if not (as_json and quiet):
            print(line, file=sys.stderr if as_json else stdout, flush=True)

    with running(as_json, threads, seed) as finish:
        from dynaxx.lab.files import write_json
        from dynaxx.lab.progress import LineProgress, SilentProgress

        if suite is not Suite.gpu and (peers or sample):
            raise typer.BadParameter(f"{'--peers' if peers else '--sample'} needs --suite gpu")
        if sample and (only or quick):
            raise typer.BadParameter("--sample draws its own rows: leave out --only and --quick")
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

                found = run_gpu_suite(quick, seed, rows, against, sample, progress=say)
        except RuntimeError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        finish(found, ok=True, write=[lambda: write_json(out, found)] if out else [])
