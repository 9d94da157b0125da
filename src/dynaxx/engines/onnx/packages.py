# SPDX-License-Identifier: Apache-2.0
"""Import ONNX's packages, or say what to install."""

from __future__ import annotations

import importlib
from typing import Any

OLDEST_RUNTIME = (1, 20)


def require(*names: str) -> None:
    """Import packages.

    Raises:
        ImportError: one is not installed, with the fix.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f"an ONNX export needs {name} ({error}): pip install 'dynaxx[onnx]'", name=name
            ) from error


def runtime() -> Any:
    """Return `onnxruntime`.

    Raises:
        ImportError: it is not installed, or too old; with the fix.
    """
    require("onnxruntime")
    import onnxruntime

    found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if found < OLDEST_RUNTIME:
        wanted = ".".join(map(str, OLDEST_RUNTIME))
        raise ImportError(
            f"ONNX Runtime must be >= {wanted}, got {onnxruntime.__version__}: pip install -U onnxruntime",
            name="onnxruntime",
        )
    return onnxruntime
