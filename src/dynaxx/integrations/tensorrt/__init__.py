# SPDX-License-Identifier: Apache-2.0
"""Build engines of TensorRT for RTX from an export to ONNX, ahead of time and without a GPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.tensorrt.engines import EngineSettings, build_engines

__all__ = ["EngineSettings", "build_engines"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import dynaxx.integrations.tensorrt.engines as module

    return getattr(module, name)
