# SPDX-License-Identifier: Apache-2.0
"""Llamas with another attention share this file: the interface of a layer, a check of masks, and the conversion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.transformers.loading import from_config


def become_llama_layer(attention: Any, config: Any, layer_idx: int) -> None:
    """Give a `ProjectedAttention` what transformers expects of a Llama's: attributes, and the bias of its output."""
    if config.attention_bias:
        attention.o_proj = nn.Linear(attention.q_heads * attention.head_dim, config.hidden_size)
    attention.config, attention.layer_idx, attention.is_causal = config, layer_idx, True
    attention.num_key_value_groups = attention.q_heads // attention.kv_heads
    attention.scaling = attention.scale


def hides_more_than_the_future(mask: Tensor | None, seqlen_q: int, seqlen_k: int) -> bool:
    """Return whether a mask (..., rows, columns), bool or added to scores, is anything but causal."""
    if mask is None:
        return False
    visible = mask if mask.dtype == torch.bool else mask >= 0
    future = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device).tril(seqlen_k - seqlen_q)
    return not torch.equal(visible[..., -seqlen_q:, :seqlen_k], future.expand(*visible.shape[:-2], -1, -1))


def refuse_other_models(model: Any) -> None:
    """Raise UnsupportedInputError unless the model is a dense Llama."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not isinstance(model, LlamaForCausalLM) or kind != "llama":
        raise UnsupportedInputError(
            f"conversion of a {kind} model", {"transformers": ["only LlamaForCausalLM (Llama, SmolLM, ...) is served"]}
        )


def with_other_attention(model: Any, model_class: Any, **settings: Any) -> tuple[Any, list[str]]:
    """Make a model of another class from a dense Llama's config and weights.

    Args:
        model: the dense Llama.
        model_class: the class of the new model, registered with transformers.
        **settings: further fields of its config.

    Returns:
        The model in the mode of the old one, and the names of its weights that the old one does not have.
    """
    values = {name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "dtype")}
    config = model_class.config_class(**values, **settings)
    config.architectures = [model_class.__name__]
    weights = next(model.parameters())
    made = from_config(AutoModelForCausalLM, config, dtype=weights.dtype).to(weights.device)  # frequencies stay fp32
    missing, unexpected = made.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected, "a Llama's own names"
    made.generation_config = model.generation_config
    return made.train(model.training), missing
