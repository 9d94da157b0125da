# SPDX-License-Identifier: Apache-2.0
"""Export a model with its policy to ONNX, and run it in ONNX Runtime."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.engines.onnx.export import OnnxExport, export_onnx
    from dynaxx.engines.onnx.session import OnnxModel

__all__ = ["OnnxExport", "OnnxModel", "export_onnx"]

__getattr__ = load_at_first_use(
    __name__,
    {
        "export": ("OnnxExport", "export_onnx"),
        "session": ("OnnxModel",),
    },
)
