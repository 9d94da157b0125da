# SPDX-License-Identifier: Apache-2.0
"""`dynaxx cache`: list and clear dynaxx's cache folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import running


class Action(StrEnum):
    """What to do with the cache."""

    show = "show"
    clean = "clean"


def cache(
    action: Annotated[Action, typer.Argument(metavar="show|clean", help="List the cached files, or remove them.")],
    as_json: JsonOption = False,
) -> None:
    r"""Show or remove the files that dynaxx caches on disk.

    The cache holds the compiled CPU core, converted models and tuned tile sizes, in $DYNAXX_CACHE,
    $XDG_CACHE_HOME/dynaxx or ~/.cache/dynaxx. dynaxx recreates them when it needs them. Stop running conversions
    before `clean`.

    \b
    Examples:
      dynaxx cache show
      dynaxx cache clean
    """
    with running(as_json) as finish:
        from dynaxx.lab.cache import clean_cache, read_cache

        found = clean_cache() if action is Action.clean else read_cache()
        finish(found, found.summary())
