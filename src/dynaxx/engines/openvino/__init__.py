# SPDX-License-Identifier: Apache-2.0
"""OpenVINO: convert a model, run a policy inside it, and convert a policy to OpenVINO GenAI's settings."""

from dynaxx.engines.openvino.convert import OpenVinoGenerator, to_openvino
from dynaxx.engines.openvino.export import export_openvino, load_openvino
from dynaxx.engines.openvino.genai import GenAiSparseAttention, sparse_attention_config
from dynaxx.engines.openvino.insert import OpenVinoPrompts, insert_policy
from dynaxx.engines.openvino.running import OpenVinoHandle, cpu_config

__all__ = [
    "GenAiSparseAttention",
    "OpenVinoGenerator",
    "OpenVinoHandle",
    "OpenVinoPrompts",
    "cpu_config",
    "export_openvino",
    "insert_policy",
    "load_openvino",
    "sparse_attention_config",
    "to_openvino",
]
