# SPDX-License-Identifier: Apache-2.0
"""OpenVINO: convert a model, run a policy inside it, and convert a policy to OpenVINO GenAI's settings."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaxx.integrations.openvino.convert import to_openvino
    from dynaxx.integrations.openvino.export import export_openvino, load_openvino
    from dynaxx.integrations.openvino.genai import GenAiSparseAttention, sparse_attention_config
    from dynaxx.integrations.openvino.insert import insert_policy
    from dynaxx.integrations.openvino.running import OpenVinoHandle, cpu_config

_SOURCE_OF = {
    "GenAiSparseAttention": "genai",
    "OpenVinoHandle": "running",
    "cpu_config": "running",
    "export_openvino": "export",
    "insert_policy": "insert",
    "load_openvino": "export",
    "sparse_attention_config": "genai",
    "to_openvino": "convert",
}

__all__ = [
    "GenAiSparseAttention",
    "OpenVinoHandle",
    "cpu_config",
    "export_openvino",
    "insert_policy",
    "load_openvino",
    "sparse_attention_config",
    "to_openvino",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _SOURCE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_SOURCE_OF[name]}"), name)
