# SPDX-License-Identifier: Apache-2.0
"""The `dynaxx` command: `dynaxx ...` or `python -m dynaxx ...`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; say what to install where it cannot start."""
    # Python has no stream for a descriptor that the caller closed (`>&-`); libraries below expect one.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if "bench" not in sys.argv[1:2]:
        # Idle threads sleep, because threads that wait in a loop take cores from those that work. Torch reads this when
        # it is first imported. A forward pass of two threads on two cores with a load of six takes a third of the time.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from dynaxx.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"error: the dynaxx command needs {error.name}: pip install 'dynaxx[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
