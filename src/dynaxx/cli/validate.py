# SPDX-License-Identifier: Apache-2.0
"""`dynaxx validate`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from dynaxx.cli.options import (
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    KindsOption,
    ModelArgument,
    OutOption,
    QuietOption,
    SeedOption,
    TextOption,
    ThreadsOption,
    names,
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
    kinds: KindsOption = "",
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Long-context tasks instead of three short ones: ruler, long, or tasks by name.",
        ),
    ] = "",
    task_lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="With --suite: prompt lengths in tokens. [default: 1024,4096]")
    ] = "",
    task_samples: Annotated[
        int | None, typer.Option(min=1, help="With --suite: prompts of each task at each length. [default: 5]")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    r"""Compare a policy with the dense model on held-out text. Writes DIR/validation.json; exit code 1 if it fails.

    Checks logits, perplexity, retrieval tasks and repetition against the policy's tolerances, and measures speed and
    memory. --kinds also checks perplexity on other kinds of text; --suite runs long-context tasks such as RULER's 13.

    \b
    Examples:
      dynaxx validate smollm2 run/policy.json --out run
      dynaxx validate ./my-model run/policy.json --text prompts.txt --lengths 2048,8192 --json
      dynaxx validate smollm2 run/policy.json --kinds all
      dynaxx validate smollm2 run/policy.json --suite ruler --task-lengths 1024,4096 --task-samples 10
    """
    with running(as_json, threads, seed) as finish:
        chosen = importlib.import_module("dynaxx.policy").load_policy(policy)
        lab, progress = tool("validate.run"), progress_of(quiet)
        check_targets(out / "validation.json")
        sample, asked = read_text(text), numbers("--lengths", lengths)
        plan = _plan(suite, numbers("--task-lengths", task_lengths), task_samples)
        others = tool("kinds").kinds_of(names(kinds))
        loaded = load(model, device, dtype, progress)
        found = lab.validate(
            *loaded,
            chosen,
            sample,
            lengths=asked or None,
            tokens=tokens,
            kinds=others,
            suite=plan,
            seed=seed,
            progress=progress,
        )
        document = document_of(found)
        write = [lambda: tool("files").write_json(out / "validation.json", document)]
        finish(document, found.summary(), ok=found.passed, write=write)


def _plan(suite: str, lengths: tuple[int, ...], samples: int | None) -> Any:
    """Return the tasks to run, or None; an option without --suite would have no effect and is refused."""
    if not suite:
        if lengths or samples:
            raise ValueError("--task-lengths and --task-samples need --suite, for example --suite ruler")
        return None
    run = tool("tasks.run")
    return run.SuitePlan(names(suite), lengths or run.LENGTHS, samples or run.SAMPLES)
