# SPDX-License-Identifier: Apache-2.0
"""Export a model with its policy to ONNX, and run it in ONNX Runtime."""

from dynaxx.engines.onnx.export import OnnxExport, export_onnx
from dynaxx.engines.onnx.session import OnnxModel

__all__ = ["OnnxExport", "OnnxModel", "export_onnx"]
