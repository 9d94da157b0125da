# SPDX-License-Identifier: Apache-2.0
"""TensorRT: engines of TensorRT for RTX from an export to ONNX, and plugins for networks of full TensorRT."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.integrations.tensorrt.engines import EngineSettings, build_engines
    from dynaxx.integrations.tensorrt.plugin import (
        LAYOUT_INPUTS,
        add_policy_attention,
        add_sparse_attention,
        layout_tensors,
        register_plugins,
    )

ENGINES = ["EngineSettings", "build_engines"]
PLUGINS = ["LAYOUT_INPUTS", "add_policy_attention", "add_sparse_attention", "layout_tensors", "register_plugins"]
__all__ = [
    "LAYOUT_INPUTS",
    "EngineSettings",
    "add_policy_attention",
    "add_sparse_attention",
    "build_engines",
    "layout_tensors",
    "register_plugins",
]

__getattr__ = load_at_first_use(__name__, {"engines": ENGINES, "plugin": PLUGINS})
