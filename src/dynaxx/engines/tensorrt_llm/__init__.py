# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM and Model-Optimizer: policies as `sparse_attention_config` of a checkpoint's config.json, and back."""

from dynaxx.engines.tensorrt_llm.checkpoint import policy_of_config, sparse_attention_config

__all__ = ["policy_of_config", "sparse_attention_config"]
