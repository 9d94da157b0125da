# SPDX-License-Identifier: Apache-2.0
"""Import OpenVINO, or say how to install it."""

from __future__ import annotations

import importlib
from typing import Any

OLDEST = (2025, 0)


def openvino() -> Any:
    """Return the module `openvino`.

    Raises:
        ImportError: it is not installed, or too old; the message says how to get it.
    """
    try:
        module = importlib.import_module("openvino")
    except ImportError as error:
        raise ImportError(f"openvino cannot be imported ({error}): pip install 'dynaxx[openvino]'") from error
    version = tuple(int(part) for part in module.__version__.split("-")[0].split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"openvino {module.__version__} is older than {OLDEST[0]}.{OLDEST[1]}: pip install -U openvino"
        )
    return module
