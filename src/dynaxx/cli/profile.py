# SPDX-License-Identifier: Apache-2.0
"""`dynaxx profile`: show where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli import options
from dynaxx.cli.running import check_targets, document_of, files_of, load, progress_of, read_text, running


def profile(
    model: options.ModelArgument,
    text: options.TextOption = "pydoc",
    lengths: options.LengthsOption = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write DIR/profile.json.")] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine per hour, to report savings in money.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of the time at which attention is worth making sparse.")
    ] = 0.2,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace of PyTorch's profiler.")] = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = options.Dtype.auto,
    threads: options.ThreadsOption = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    r"""Show where time goes, and if sparse attention is worth it.

    Measures the machine's peak rates, then at each length the time in attention, projections, MLP and the rest.

    \b
    Examples:
      dynaxx profile smollm2
      dynaxx profile ./my-model --text prompts.txt --lengths 2048,8192,32768 --price-per-hour 2.50
      dynaxx profile smollm2 --lengths 4096 --trace trace.json
    """
    result = out and out / "profile.json"
    with running(as_json, threads, seed, resumes=result is not None) as finish:
        from dynaxx.lab.files import state_of
        from dynaxx.lab.models import model_name
        from dynaxx.lab.profile.run import default_lengths, write_trace
        from dynaxx.lab.profile.run import profile as run_profile

        progress = progress_of(quiet)
        check_targets(result, trace)
        sample, asked = read_text(text), options.numbers("--lengths", lengths)
        loaded = load(model, device, dtype, progress)
        asked = asked or default_lengths(loaded.model)
        found = run_profile(
            *loaded,
            sample,
            lengths=asked,
            name=model_name(model),
            threshold=threshold,
            price_per_hour=price_per_hour,
            progress=progress,
            state=result and state_of(result),
        )
        document = document_of(found, loaded.model, sample)
        write = files_of(result, document) if result else []
        if trace:
            write.append(lambda: write_trace(*loaded, sample, max(asked), trace))
        finish(document, found.summary(), write=write)
