# SPDX-License-Identifier: Apache-2.0
"""`dynaxx cache`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import running, tool


class Action(StrEnum):
    """What to do with the cache."""

    show = "show"
    clean = "clean"


def cache(
    action: Annotated[Action, typer.Argument(metavar="show|clean", help="List what is kept, or remove it.")],
    as_json: JsonOption = False,
) -> None:
    r"""Show or remove what dynaxx keeps on disk.

    Kept are the compiled CPU core, converted models and tuned tile sizes, in $DYNAXX_CACHE, $XDG_CACHE_HOME/dynaxx or
    ~/.cache/dynaxx. Everything is made again when it is needed. Stop conversions that are under way before `clean`.

    \b
    Examples:
      dynaxx cache show
      dynaxx cache clean
    """
    with running(as_json) as finish:
        caches = tool("cache")
        found = caches.clean_cache() if action is Action.clean else caches.read_cache()
        finish(found, found.summary())
