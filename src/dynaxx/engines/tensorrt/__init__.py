# SPDX-License-Identifier: Apache-2.0
"""TensorRT: engines of TensorRT for RTX from an export to ONNX, and plugins for networks of full TensorRT."""

from dynaxx.engines.tensorrt.engines import EngineSettings, build_engines
from dynaxx.engines.tensorrt.plugin import add_policy_attention, add_sparse_attention, register_plugins
from dynaxx.engines.tensorrt.plugin_policy import LAYOUT_INPUTS, layout_tensors

__all__ = [
    "LAYOUT_INPUTS",
    "EngineSettings",
    "add_policy_attention",
    "add_sparse_attention",
    "build_engines",
    "layout_tensors",
    "register_plugins",
]
