# SPDX-License-Identifier: Apache-2.0
"""Build engines of TensorRT for RTX from an export to ONNX, ahead of time and without a GPU."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.tensorrt.engines import EngineSettings, build_engines

__all__ = ["EngineSettings", "build_engines"]

__getattr__ = load_at_first_use(__name__, {"engines": __all__})
