# SPDX-License-Identifier: Apache-2.0
"""Import scripts of `examples/` and `benchmarks/`, which import their neighbours by name."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def import_example(name: str) -> ModuleType:
    """Return a script of `examples/` as a module."""
    return import_script(ROOT / "examples", name)


def import_script(folder: Path, name: str) -> ModuleType:
    """Return a script of a folder as a module."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
