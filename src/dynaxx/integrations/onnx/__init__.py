# SPDX-License-Identifier: Apache-2.0
"""Export a model with its policy to ONNX, and run it in ONNX Runtime."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.onnx.export import OnnxExport, export_onnx
    from dynaxx.integrations.onnx.session import OnnxModel

__all__ = ["OnnxExport", "OnnxModel", "export_onnx"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "OnnxModel":
        from dynaxx.integrations.onnx.session import OnnxModel

        return OnnxModel
    import dynaxx.integrations.onnx.export as module

    return getattr(module, name)
