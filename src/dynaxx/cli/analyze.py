# SPDX-License-Identifier: Apache-2.0
"""`dynaxx analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import (
    BlockSizeOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    ModelArgument,
    OutOption,
    QuietOption,
    SeedOption,
    TextOption,
    ThreadsOption,
    numbers,
)
from dynaxx.cli.running import check_targets, document_of, load, progress_of, read_text, running, summary_of, tool

BERTVIZ_CHARS = 400  # BertViz draws every pair of tokens


def analyze(
    model: ModelArgument,
    text: TextOption = "pydoc",
    out: OutOption = Path("dynaxx-run"),
    tokens: Annotated[int, typer.Option(min=2, help="Length of the sample.")] = 4096,
    layers: Annotated[str, typer.Option(metavar="N,N-M,...", help="Which layers; all by default.")] = "",
    heads: Annotated[str, typer.Option(metavar="N,N-M,...", help="Which heads; all by default.")] = "",
    block_size: BlockSizeOption = 64,
    bertviz: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a BertViz page of a short excerpt.")
    ] = None,
    reuse: Annotated[
        int,
        typer.Option(min=1, help="Also measure the cost of sharing one selection among this many consecutive layers."),
    ] = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Show where heads attend and which pattern keeps it. Writes DIR/analysis.json.

    \b
    Examples:
      dynaxx analyze smollm2 --out run
      dynaxx analyze ./my-model --text prompts.txt --tokens 16384 --layers 0,8-11 --out run
      dynaxx analyze smollm2 --layers 3 --bertviz heads.html
      dynaxx analyze smollm2 --reuse 2
    """
    with running(as_json, threads, seed) as finish:
        progress = progress_of(quiet)
        check_targets(out / "analysis.json", out / "reuse.json" if reuse > 1 else None, bertviz)
        chosen = {"layers": numbers("--layers", layers) or None, "heads": numbers("--heads", heads) or None}
        sample = tool("texts").split_text(read_text(text)).calibration
        loaded = load(model, device, dtype, progress)
        found = tool("analyze.run").analyze(
            *loaded,
            sample,
            tokens=tokens,
            **chosen,
            block_size=block_size,
            seed=seed,
            progress=progress,
        )
        document = document_of(found)
        write = [lambda: tool("files").write_json(out / "analysis.json", document)]
        if bertviz:
            excerpt = sample[:BERTVIZ_CHARS]
            write.append(lambda: tool("analyze.bertviz_view").write_bertviz(*loaded, excerpt, bertviz) or bertviz)
        summary = summary_of(found)
        if reuse > 1:
            costs = tool("tune.reuse").measure_reuse(
                *loaded, sample, reuse=reuse, tokens=tokens, block_size=block_size, seed=seed, progress=progress
            )
            write.append(lambda: tool("files").write_json(out / "reuse.json", costs.to_dict()))
            summary += f"\n\n{summary_of(costs)}"
        finish(document, summary, write=write)
