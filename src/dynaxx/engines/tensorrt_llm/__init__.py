# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM and Model-Optimizer: policies as `sparse_attention_config` of a checkpoint's config.json, and back."""

from typing import TYPE_CHECKING

from dynaxx.lazy import load_at_first_use

if TYPE_CHECKING:
    from dynaxx.engines.tensorrt_llm.checkpoint import policy_of_config, sparse_attention_config

__all__ = ["policy_of_config", "sparse_attention_config"]

__getattr__ = load_at_first_use(__name__, {"checkpoint": __all__})
