# SPDX-License-Identifier: Apache-2.0
"""Import a script of `examples/`, which imports its neighbours by name."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def import_example(name: str) -> ModuleType:
    """Return a script of `examples/` as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
