# SPDX-License-Identifier: Apache-2.0
"""`dynaxx diff`: compare two policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import running


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
