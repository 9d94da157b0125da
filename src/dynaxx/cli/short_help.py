# SPDX-License-Identifier: Apache-2.0
"""`--help` that shows the main options of a command, and `--help-all`, which shows all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


def with_short_help(main: Collection[str]) -> type[TyperCommand]:
    """Return a class of commands whose `--help` shows only the options with these names of parameters.

    The command needs a parameter of type `HelpAllOption`.
    """

    class ShortHelp(TyperCommand):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _hide_options(self, shown=(*main, "help_all"))
            self.epilog = "More options with --help-all."

    return ShortHelp


def _hide_options(command: Any, shown: Collection[str] | None) -> None:
    """Hide the options that are not shown; None shows all."""
    for each in command.params:
        if each.param_type_name == "option":
            each.hidden = shown is not None and each.name not in shown


def _show_all(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        _hide_options(context.command, shown=None)
        context.command.epilog = None
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options and exit.")
]
