# SPDX-License-Identifier: Apache-2.0
"""Import OpenVINO's packages, or say how to install them."""

from __future__ import annotations

import importlib
from typing import Any

OLDEST = (2025, 0)


def openvino() -> Any:
    """Return the module `openvino`.

    Raises:
        ImportError: it is not installed, or too old; the message says how to get it.
    """
    module = _module("openvino", "pip install 'dynaxx[openvino]'")
    version = tuple(int(part) for part in module.__version__.split("-")[0].split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"openvino {module.__version__} is older than {OLDEST[0]}.{OLDEST[1]}: pip install -U openvino"
        )
    return module


def openvino_genai() -> Any:
    """Return the module `openvino_genai`. Raises as `openvino`."""
    return _module("openvino_genai", "pip install openvino-genai")


def _module(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): {install}") from error
