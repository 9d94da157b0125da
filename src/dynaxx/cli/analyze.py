# SPDX-License-Identifier: Apache-2.0
"""`dynaxx analyze`: show where each head attends, and which rule preserves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli import options
from dynaxx.cli.running import check_targets, document_of, load, progress_of, read_text, renewed_report, running

BERTVIZ_CHARS = 400  # BertViz draws every pair of tokens


def analyze(
    model: options.ModelArgument,
    text: options.TextOption = "pydoc",
    out: options.OutOption = Path("dynaxx-run"),
    tokens: Annotated[int, typer.Option(min=2, help="Length of the sample.")] = 4096,
    layers: Annotated[str, typer.Option(metavar="N,N-M,...", help="Which layers; all by default.")] = "",
    heads: Annotated[str, typer.Option(metavar="N,N-M,...", help="Which heads; all by default.")] = "",
    block_size: options.BlockSizeOption = 64,
    bertviz: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a BertViz page of a short excerpt.")
    ] = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = options.Dtype.auto,
    threads: options.ThreadsOption = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    r"""Show where heads attend and which pattern keeps it. Writes DIR/analysis.json.

    \b
    Examples:
      dynaxx analyze smollm2 --out run
      dynaxx analyze ./my-model --text prompts.txt --tokens 16384 --layers 0,8-11 --out run
      dynaxx analyze smollm2 --layers 3 --bertviz heads.html
    """
    with running(as_json, threads, seed) as finish:
        from dynaxx.lab.analyze.run import analyze as run_analysis
        from dynaxx.lab.files import write_json
        from dynaxx.lab.texts import split_text

        progress = progress_of(quiet)
        check_targets(out / "analysis.json", bertviz)
        chosen = {
            "layers": options.numbers("--layers", layers) or None,
            "heads": options.numbers("--heads", heads) or None,
        }
        whole = read_text(text)
        sample = split_text(whole).calibration
        loaded = load(model, device, dtype, progress)
        found = run_analysis(
            *loaded,
            sample,
            tokens=tokens,
            **chosen,
            block_size=block_size,
            seed=seed,
            progress=progress,
        )
        document = document_of(found, loaded.model, whole)
        write = [lambda: write_json(out / "analysis.json", document)]
        if bertviz:
            from dynaxx.lab.analyze.bertviz_view import write_bertviz

            excerpt = sample[:BERTVIZ_CHARS]
            write.append(lambda: write_bertviz(*loaded, excerpt, bertviz) or bertviz)
        finish(document, found.summary(), write=[*write, *renewed_report(out)])
