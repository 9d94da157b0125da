# SPDX-License-Identifier: Apache-2.0
"""`dynaxx retune`: renew a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli import options
from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import check_targets, command_line, load, progress_of, read_text, running

PolicyArgument = Annotated[Path, typer.Argument(metavar="POLICY", help="The policy file in use.")]


def retune(
    policy: PolicyArgument,
    stats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Statistics that a process recorded (handle.record).")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Model to record fresh statistics with, on --text, instead of --stats.")
    ] = "",
    text: options.TextOption = "pydoc",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The new policy. [default: only show it]")] = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="Keep the budgets, and only store the recorded statistics as the reference."),
    ] = False,
    recall: Annotated[
        float | None, typer.Option(min=0, max=1, help="Recall goal for every head. [default: the reference's, by head]")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts to run with --model.")] = 96,
    lengths: options.LengthsOption = "",
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = options.Dtype.auto,
    threads: options.ThreadsOption = None,
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    r"""Adapt a policy to its traffic, and show the changes. Writes a new file only with --out.

    Each head gets the smallest budget that reaches the recall it had in the policy's reference.

    \b
    Examples:
      dynaxx retune policy.json --model smollm2 --record --out policy.json
      dynaxx retune policy.json --stats statistics.json --out new.json
      dynaxx retune policy.json --model smollm2 --text prompts.txt --out new.json
    """
    with running(as_json, threads, seed) as finish:
        from dynaxx.lab.tune.retune import retune as run_retune
        from dynaxx.policy import load_policy, load_profile, save_policy

        progress = progress_of(quiet)
        check_targets(out)
        old = load_policy(policy)
        statistics = load_profile(stats) if stats else None
        sample, asked = read_text(text) if model else "", options.numbers("--lengths", lengths)
        found = run_retune(
            old,
            statistics=statistics,
            loaded=load(model, device, dtype, progress) if model else None,
            text=sample,
            requests=requests,
            lengths=asked,
            recall=recall,
            record_only=record,
            seed=seed,
            command=command_line(),
            progress=progress,
        )
        said = found.summary() if out else f"{found.summary()}\nno file was written; pass --out FILE to write one"
        finish(found, said, write=[lambda: save_policy(found.policy, out) or out] if out else [])


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A policy file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another policy file.")],
    as_json: JsonOption = False,
) -> None:
    r"""Show the differences between two policies.

    \b
    Example:
      dynaxx diff policy.json new.json
    """
    with running(as_json) as finish:
        from dynaxx.policy import load_policy
        from dynaxx.policy.diff import diff as compare

        found = compare(load_policy(old), load_policy(new))
        finish(found, found.summary())
