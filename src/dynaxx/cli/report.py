# SPDX-License-Identifier: Apache-2.0
"""`dynaxx report`: write the results in a folder as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaxx.cli.options import JsonOption
from dynaxx.cli.running import running


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the JSON files of other commands.")],
    as_json: JsonOption = False,
) -> None:
    r"""Write the results in DIR as a page. DIR/report.html needs no network.

    \b
    Example:
      dynaxx report run
    """
    with running(as_json) as finish:
        from dynaxx.lab.report.run import FILES, write_report

        if not run_dir.is_dir():
            raise ValueError(f"DIR must be a folder with results of dynaxx tune or other commands, got {run_dir}")
        if not any((run_dir / file).exists() for file in FILES.values()):
            raise ValueError(f"{run_dir} holds no results; run dynaxx tune MODEL --out {run_dir} first")
        path = write_report(run_dir)
        finish({"report": str(path)}, "", files=[path])
