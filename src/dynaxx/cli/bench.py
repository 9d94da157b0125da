# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench`: test sparse attention, then time it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import DeviceOption, JsonOption, SeedOption, ThreadsOption, device_of
from dynaxx.cli.running import check_targets, running


def bench(
    seqlen: Annotated[
        int | None, typer.Option(min=512, help="Tokens; 4,096 on a CPU and 32,768 on a GPU by default.")
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the figures as JSON.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    r"""Test the kernels, then time them beside dense attention.

    A result that is wrong has no time, and gives exit code 1. The repository's benchmarks/suites measure more shapes,
    decoding and peers.

    \b
    Examples:
      dynaxx bench
      dynaxx bench --seqlen 16384 --threads 1 --out cpu.json
    """
    stdout = sys.stdout  # rows are printed as they are measured
    with running(as_json, threads, seed) as finish:
        from dynaxx.lab.bench import run_bench
        from dynaxx.lab.files import write_json

        place = device_of(device)
        check_targets(out)
        say = lambda line: print(line, file=sys.stderr if as_json else stdout, flush=True)
        typer.echo("testing the kernels against fp64, then timing dense attention; rows follow", err=True)
        try:
            found = run_bench(place, seqlen=seqlen, seed=seed, say=say)
        except RuntimeError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        finish(found, ok=True, write=[lambda: write_json(out, found)] if out else [])
