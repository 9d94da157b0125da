# SPDX-License-Identifier: Apache-2.0
"""`dynaxx validate`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import (
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
from dynaxx.cli.running import check_targets, document_of, load, progress_of, read_text, running, tool


def validate(
    model: ModelArgument,
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy file, as tune writes it.")],
    text: TextOption = "pydoc",
    out: OutOption = Path("dynaxx-run"),
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Prompt lengths in tokens. [default: 512, 2048 and 8192, as far as the model and the text allow]",
        ),
    ] = "",
    tokens: Annotated[int | None, typer.Option(min=2, help="Length of the held-out samples. [default: 4096]")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Compare a policy with the dense model on held-out text. Writes DIR/validation.json; exit code 1 on fail.

    Logits, perplexity, retrieval tasks, repetition, speed and memory, against the policy's own tolerances.

    \b
    Examples:
      dynaxx validate smollm2 run/policy.json --out run
      dynaxx validate ./my-model run/policy.json --text prompts.txt --lengths 2048,8192 --json
    """
    with running(as_json, threads, seed) as finish:
        chosen = importlib.import_module("dynaxx.policy").load_policy(policy)
        lab, progress = tool("validate.run"), progress_of(quiet)
        check_targets(out / "validation.json")
        sample, asked = read_text(text), numbers("--lengths", lengths)
        loaded = load(model, device, dtype, progress)
        found = lab.validate(
            *loaded,
            chosen,
            sample,
            lengths=asked or None,
            tokens=tokens,
            seed=seed,
            progress=progress,
        )
        document = document_of(found)
        write = [lambda: tool("files").write_json(out / "validation.json", document)]
        finish(document, found.summary(), ok=found.passed, write=write)
