# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench`: test kernels, then time them."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption, QuietOption, SeedOption, ThreadsOption, device_of, numbers
from dynaxx.cli.running import check_targets, running


class Suite(StrEnum):
    """Benchmark suites: kernels, or a whole model in each CPU engine."""

    cpu = "cpu"
    gpu = "gpu"
    cpu_model = "cpu-model"


def bench(
    suite: Annotated[Suite, typer.Option(help="Kernels, or a whole model in CPU engines.")] = Suite.cpu,
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
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="GPU: draw time and memory from 4k to 1M tokens, SVG.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy", metavar="FILE", help="cpu-model: the policy. Default: 30 % of the blocks in all heads."
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="TOKENS", help="cpu-model: prompt lengths, separated by commas.")
    ] = "",
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="DIR", help="cpu-model: store converted models in DIR for later runs."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the figures as JSON.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Test the kernels, then time them beside dense attention.

    A kernel that fails its test is not timed. Exit code 1 if a kernel fails, or if a figure misses its target.

    \b
    Examples:
      dynaxx bench --suite cpu --quick
      dynaxx bench --suite cpu --only "window 512,decode"
      dynaxx bench --suite gpu --out gpu.json --plot growth.svg
      dynaxx bench --suite gpu --only "window,layouts"
      dynaxx bench --suite gpu --peers flex
      dynaxx bench --suite cpu-model --only fp32 --lengths 2048,8192 --policy demo/smollm2/policy.json
    """
    stdout = sys.stdout  # rows are printed as they are measured

    def say(line: str) -> None:
        if not (as_json and quiet):
            print(line, file=sys.stderr if as_json else stdout, flush=True)

    with running(as_json, threads, seed) as finish:
        from dynaxx.lab.files import write_json
        from dynaxx.lab.progress import LineProgress, SilentProgress

        if suite is not Suite.gpu and (peers or plot):
            raise typer.BadParameter("--peers and --plot need --suite gpu")
        if suite is not Suite.cpu_model and (policy or lengths or work):
            raise typer.BadParameter("--policy, --lengths and --work need --suite cpu-model")
        device_of("cuda" if suite is Suite.gpu else "cpu")
        check_targets(out, plot)
        try:
            split = lambda names: [name.strip() for name in names.split(",")]
            rows, against = split(only) if only else [], split(peers) if peers else None
            if suite is Suite.cpu:
                from dynaxx.lab.bench.cpu import run_cpu_suite

                with (SilentProgress() if quiet else LineProgress()).task("Testing and timing CPU kernels") as task:
                    beat = lambda note: task.advance(0, note)
                    found = run_cpu_suite(quick=quick, threads=threads, seed=seed, only=rows, progress=say, beat=beat)
            elif suite is Suite.cpu_model:
                from dynaxx.lab.bench.cpu_model import run_cpu_model_suite

                found = run_cpu_model_suite(
                    quick=quick,
                    threads=threads,
                    only=rows,
                    progress=say,
                    policy=policy,
                    lengths=numbers("--lengths", lengths),
                    work=work,
                )
            else:
                from dynaxx.lab.bench.gpu import run_gpu_suite

                found = run_gpu_suite(quick=quick, seed=seed, only=rows, peers=against, progress=say, plot=plot)
        except RuntimeError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        ok = all(target["ok"] is not False for target in found.get("targets", ()))
        write = [lambda: write_json(out, found)] if out else []
        finish(found, ok=ok, files=[plot] if plot and suite is Suite.gpu else [], write=write)
