# SPDX-License-Identifier: Apache-2.0
"""`dynaxx doctor`: show what this machine can serve, and check it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dynaxx.cli import options
from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import echo, progress_of, running


def doctor(
    q_heads: Annotated[int, typer.Option(help="Query heads of your model.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    seqlen: Annotated[int, typer.Option(help="Prompt length.")] = 1024,
    dtype: options.DtypeOption = options.Dtype.auto,
    block_size: options.BlockSizeOption = 64,
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Check the whole prompt length, which may take minutes.")
    ] = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Print what was shown for every kind of GPU, and check nothing.")
    ] = False,
    fuzz: Annotated[
        str, typer.Option("--fuzz", metavar="TIME", help="Check random problems instead, for this long: 90, 10m or 2h.")
    ] = "",
    fuzz_cases: Annotated[
        int | None, typer.Option("--fuzz-cases", min=1, help="Stop after this many problems.")
    ] = None,
    isas: Annotated[
        list[str] | None, typer.Option("--isa", metavar="NAME", help="With --fuzz: builds of the CPU core to check.")
    ] = None,
    fuzz_seed: Annotated[int | None, typer.Option("--fuzz-seed", help="Check this one random problem again.")] = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    r"""Show which backends serve your shapes, and check them.

    Lists the machine, the versions, the backends that can serve your shapes, and why the others cannot. Compares each
    usable backend, forward and gradients, with attention computed in fp64: within seconds on a few blocks, with --full
    at the length of your prompts. With --fuzz it checks random problems
    instead: patterns, selectors, ragged batches, shapes, strides and dtypes. A failure prints the command that
    repeats it, and the summary names the seed to continue from. Exit code 1 if a backend is wrong.

    \b
    Examples:
      dynaxx doctor
      dynaxx doctor --q-heads 32 --kv-heads 8 --head-dim 128 --seqlen 8192 --dtype bfloat16
      dynaxx doctor --json | jq .chosen
      dynaxx doctor --gpus
      dynaxx doctor --fuzz 10m
      dynaxx doctor --fuzz-cases 10000 --isa x86-64-v3 --isa baseline
    """
    with running(as_json, threads) as finish:
        if gpus:
            from dynaxx.lab.doctor.gpu import GpuTable

            finish(GpuTable(), GpuTable().summary(), ok=True)
            return
        if fuzz or fuzz_cases is not None or fuzz_seed is not None:
            from dynaxx.lab.doctor.fuzz import fuzz as run_fuzz

            result = run_fuzz(
                options.seconds("--fuzz", fuzz),
                seed=seed if fuzz_seed is None else fuzz_seed,
                cases=fuzz_cases if fuzz_seed is None else 1,
                device=options.device_of(device),
                isas=isas or (),
                progress=progress_of(quiet),
            )
            finish(result, result.summary(), ok=result.ok)
            return
        if isas:
            raise ValueError("--isa needs --fuzz, --fuzz-cases or --fuzz-seed")
        from dynaxx.lab.doctor.run import diagnose

        found = diagnose(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            seqlen=seqlen,
            dtype=options.dtype_of(dtype, options.device_of(device)),
            block_size=block_size,
            device=options.device_of(device),
            seed=seed,
            full=full,
            progress=progress_of(quiet),
            say=(lambda line: None) if quiet else (lambda line: echo(line, err=True)),
        )
        finish(found, found.summary(), ok=found.ok)


class Action(StrEnum):
    """`dynaxx cache` shows cached files, or removes them."""

    show = "show"
    clean = "clean"


def cache(
    action: Annotated[Action, typer.Argument(metavar="show|clean", help="List the cached files, or remove them.")],
    as_json: JsonOption = False,
) -> None:
    r"""Show or remove the files that dynaxx caches on disk.

    The cache holds the compiled CPU core, converted models and tuned tile sizes, in $DYNAXX_CACHE,
    $XDG_CACHE_HOME/dynaxx or ~/.cache/dynaxx. dynaxx recreates them when it needs them. Stop running conversions
    before `clean`.

    \b
    Examples:
      dynaxx cache show
      dynaxx cache clean
    """
    with running(as_json) as finish:
        from dynaxx.lab.cache import clean_cache, read_cache

        found = clean_cache() if action is Action.clean else read_cache()
        finish(found, found.summary())
