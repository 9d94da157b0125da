# SPDX-License-Identifier: Apache-2.0
"""The `dynaxx` command line: one file per command, which parses options and calls its tool in `dynaxx.lab`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

import dynaxx
from dynaxx.cli.analyze import analyze
from dynaxx.cli.bench import bench
from dynaxx.cli.doctor import cache, doctor
from dynaxx.cli.export import export
from dynaxx.cli.options import with_short_help
from dynaxx.cli.profile import profile
from dynaxx.cli.report import report
from dynaxx.cli.retune import diff, retune
from dynaxx.cli.tune import MAIN_OPTIONS, tune
from dynaxx.cli.validate import validate
from dynaxx.cli.watch import serve_metrics, watch


def _help(command: Callable[..., Any]) -> str:
    """Return a command's docstring, with click's mark for lines that must not be joined."""
    return (inspect.getdoc(command) or "").replace("\\b\n", "\b\n")


app = typer.Typer(
    help="Practical sparse attention: measure a model, choose a policy, prove it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    doctor,
    profile,
    analyze,
    tune,
    validate,
    report,
    bench,
    importlib.import_module("dynaxx.trained.convert").convert,  # of a wing, which the core does not import
    export,
    retune,
    diff,
    watch,
    serve_metrics,
    cache,
):  # in the order of `dynaxx --help`
    shown = with_short_help(MAIN_OPTIONS) if command is tune else None
    app.command(help=_help(command), cls=shown)(command)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(dynaxx.__version__)
        raise typer.Exit
