# SPDX-License-Identifier: Apache-2.0
"""A small model with learned sinks for vLLM: gpt-oss's attention in Llama's layers.

gpt-oss itself needs vLLM's kernels for mixtures of experts, which these tests leave out. Its attention is vLLM's own
class, with sinks in every layer, windows in those of even index, biases and YaRN.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm import ModelRegistry
from vllm.model_executor.models.gpt_oss import OAIAttention
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

NAME = "SinkLlamaForCausalLM"


class SinkAttention(OAIAttention):
    """gpt-oss's attention with the arguments of Llama's."""

    def __init__(self, *, config: Any, quant_config: Any, cache_config: Any, prefix: str, **_: Any) -> None:
        super().__init__(config, quant_config, cache_config, prefix)


class SinkLayer(LlamaDecoderLayer):
    """Llama's layer with that attention."""

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=SinkAttention)


class SinkLlamaForCausalLM(LlamaForCausalLM):
    """Llama with sinks."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SinkLayer)


def register() -> None:
    """Let vLLM find the model in this process."""
    ModelRegistry.register_model(NAME, SinkLlamaForCausalLM)


def add_sinks(folder: Path) -> None:
    """Turn a saved Llama into this model: add sinks to its weights, of the size of scores, so that they matter."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights, draw = load_file(path), torch.Generator().manual_seed(1)
    for layer in range(config["num_hidden_layers"]):
        sinks = torch.randn(config["num_attention_heads"], generator=draw) * 2 + 4
        weights[f"model.layers.{layer}.self_attn.sinks"] = sinks.to(torch.bfloat16)
    save_file(weights, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}))
