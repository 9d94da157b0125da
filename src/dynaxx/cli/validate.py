# SPDX-License-Identifier: Apache-2.0
"""`dynaxx validate`: compare a model under a policy with the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaxx.cli import options
from dynaxx.cli.running import check_targets, document_of, files_of, load, progress_of, read_text, running

if TYPE_CHECKING:
    from dynaxx.lab.tasks.run import SuitePlan


def validate(
    model: options.ModelArgument,
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="A policy file, as tune writes it.")],
    text: options.TextOption = "pydoc",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results. [default: the folder of POLICY]"),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Prompt lengths in tokens. [default: 512, 2048 and 8192, as far as the model and the text allow]",
        ),
    ] = "",
    tokens: Annotated[int | None, typer.Option(min=2, help="Length of the held-out samples. [default: 4096]")] = None,
    kinds: options.KindsOption = "",
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
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = options.Dtype.auto,
    threads: options.ThreadsOption = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    r"""Compare a policy with the dense model. Writes validation.json beside it; exit code 1 if it fails.

    Checks logits, perplexity, retrieval tasks and repetition against the policy's tolerances, and measures speed and
    memory. --kinds also checks perplexity on other kinds of text; --suite runs long-context tasks such as RULER's 13.

    \b
    Examples:
      dynaxx validate smollm2 run/policy.json
      dynaxx validate ./my-model run/policy.json --text prompts.txt --lengths 2048,8192 --json
      dynaxx validate smollm2 run/policy.json --kinds all
      dynaxx validate smollm2 run/policy.json --suite ruler --task-lengths 1024,4096 --task-samples 10
    """
    with running(as_json, threads, seed, resumes=True) as finish:
        from dynaxx.lab.files import alone_in, state_of
        from dynaxx.lab.kinds import kinds_of
        from dynaxx.lab.validate.run import check_sparse
        from dynaxx.lab.validate.run import validate as run_validation
        from dynaxx.policy import load_policy

        chosen = load_policy(policy)
        check_sparse(chosen)
        progress, result = progress_of(quiet), (out or policy.parent) / "validation.json"
        check_targets(result)
        sample, asked = read_text(text), options.numbers("--lengths", lengths)
        plan = _plan(suite, options.numbers("--task-lengths", task_lengths), task_samples)
        others = kinds_of(options.names(kinds))
        loaded = load(model, device, dtype, progress)
        with alone_in(result.parent):
            found = run_validation(
                *loaded,
                chosen,
                sample,
                lengths=asked or None,
                tokens=tokens,
                kinds=others,
                suite=plan,
                seed=seed,
                progress=progress,
                state=state_of(result),
            )
        document = document_of(found, loaded.model, sample, chosen)
        finish(document, found.summary(), ok=found.passed, write=files_of(result, document))


def _plan(suite: str, lengths: tuple[int, ...], samples: int | None) -> SuitePlan | None:
    """Return the tasks to run, or None; an option without --suite would have no effect and is refused."""
    if not suite:
        if lengths or samples:
            raise ValueError("--task-lengths and --task-samples need --suite, for example --suite ruler")
        return None
    from dynaxx.lab.tasks.run import LENGTHS, SAMPLES, SuitePlan

    return SuitePlan(options.names(suite), lengths or LENGTHS, samples or SAMPLES)
