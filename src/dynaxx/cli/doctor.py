"""`dynaxx doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from dynaxx.cli.options import (
    BlockSizeOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    device_of,
    dtype_of,
    seconds,
)
from dynaxx.cli.running import progress_of, running, tool


def doctor(
    q_heads: Annotated[int, typer.Option(help="Query heads of your model.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    seqlen: Annotated[int, typer.Option(help="Prompt length.")] = 1024,
    dtype: DtypeOption = Dtype.auto,
    block_size: BlockSizeOption = 64,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    fuzz: Annotated[
        str, typer.Option("--fuzz", metavar="TIME", help="Check random problems instead, for so long: 90, 10m or 2h.")
    ] = "",
    fuzz_seed: Annotated[int | None, typer.Option("--fuzz-seed", help="Check this one random problem again.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what this machine can serve, and check it against an oracle.

    Lists machine and versions, which backends can serve your shapes and why the others cannot, and compares each that
    can, forward and gradients, with attention computed in fp64. With --fuzz, random patterns, selectors, shapes and
    dtypes are checked; a failing one prints the line that shows it again. Exit code 1 if a backend is wrong.

    \b
    Examples:
      dynaxx doctor
      dynaxx doctor --q-heads 32 --kv-heads 8 --head-dim 128 --seqlen 8192 --dtype bfloat16
      dynaxx doctor --json | jq .chosen
      dynaxx doctor --fuzz 10m
    """
    with running(as_json, threads) as finish:
        if fuzz or fuzz_seed is not None:
            result = tool("fuzz").fuzz(
                seconds(fuzz) or 0.0,
                seed=seed if fuzz_seed is None else fuzz_seed,
                cases=None if fuzz_seed is None else 1,
                device=device_of(device),
                progress=progress_of(quiet),
            )
            finish(result, result.summary(), ok=result.ok)
            return
        found = tool("doctor").diagnose(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            seqlen=seqlen,
            dtype=dtype_of(dtype, device_of(device)),
            block_size=block_size,
            device=device_of(device),
            seed=seed,
            progress=progress_of(quiet),
        )
        finish(found, found.summary(), ok=found.ok)
