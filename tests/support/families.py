# SPDX-License-Identifier: Apache-2.0
"""Families of models, each with a tiny random model of its real config class, and what `dynaxx.apply` does with it.

`python tests/support/families.py` writes the table of docs/guides/models.md, and test_own_pattern.py checks it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dynaxx.integrations.transformers.batching import other_transformers

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
SLIDING, FULL = "sliding_attention", "full_attention"
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "output_router_logits": False}
SHARED = {**MOE, "shared_expert_intermediate_size": 16}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

older = importlib.util.find_spec("transformers") is not None and bool(other_transformers())
older_transformers = pytest.mark.skipif(older, reason="needs transformers 5.23 or newer")


class Family(NamedTuple):
    """A family of models."""

    name: str
    pattern: str  # of its layers, in the field's words
    config: str
    model: str
    changes: dict[str, Any] = {}  # noqa: RUF012
    layers: int = 2  # that are attention
    untrained: bool = False  # gradients are not compared: recurrent layers beside attention are slow

    def build(self) -> Any:
        """Return the model in fp32 and eval mode."""
        import transformers

        torch.manual_seed(0)
        base = {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
            "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        given = {name: value for name, value in {**base, **self.changes}.items() if value is not None}
        config = getattr(transformers, self.config)(**given)
        config._experts_implementation = "eager"  # the others take no fp64
        return getattr(transformers, self.model)(config).eval()


LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
WINDOW = {"sliding_window": 24}
MIXED = {**WINDOW, "layer_types": [SLIDING, FULL]}

FAMILIES = (
    Family("Llama", "full", "LlamaConfig", "LlamaForCausalLM"),
    Family("Mistral", "window", "MistralConfig", "MistralForCausalLM", WINDOW),
    Family("Ministral", "window and full", "MinistralConfig", "MinistralForCausalLM", MIXED),
    Family("Mixtral", "window", "MixtralConfig", "MixtralForCausalLM", {**WINDOW, **EXPERTS}),
    Family("Qwen 2", "window and full", "Qwen2Config", "Qwen2ForCausalLM", {**MIXED, "use_sliding_window": True}),
    Family("Qwen 2 MoE", "full", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", SHARED),
    Family("Qwen 3", "full", "Qwen3Config", "Qwen3ForCausalLM"),
    Family("Qwen 3 MoE", "full", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    Family("Phi-3", "window", "Phi3Config", "Phi3ForCausalLM", WINDOW),
    Family("Gemma", "full", "GemmaConfig", "GemmaForCausalLM"),
    Family("Gemma 2", "window and full, capped scores", "Gemma2Config", "Gemma2ForCausalLM", {
        **MIXED, "attn_logit_softcapping": 3.0}),
    Family("Gemma 3", "window and full", "Gemma3TextConfig", "Gemma3ForCausalLM", MIXED),
    Family("Gemma 4", "window and full, keys as values", "Gemma4TextConfig", "Gemma4ForCausalLM", {
        **MIXED, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}),
    Family("gpt-oss", "window and full, learned sinks", "GptOssConfig", "GptOssForCausalLM", {
        **MIXED, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    Family("OLMo 2", "full", "Olmo2Config", "Olmo2ForCausalLM"),
    Family("OLMo 3", "window and full", "Olmo3Config", "Olmo3ForCausalLM", MIXED),
    Family("Cohere 2", "window and full", "Cohere2Config", "Cohere2ForCausalLM", MIXED),
    Family("SmolLM 3", "full", "SmolLM3Config", "SmolLM3ForCausalLM"),
    Family("GLM 4", "full", "Glm4Config", "Glm4ForCausalLM"),
    Family("Granite", "full", "GraniteConfig", "GraniteForCausalLM"),
    Family("Llama 4", "chunks and full", "Llama4TextConfig", "Llama4ForCausalLM", {
        **EXPERTS, "attention_chunk_size": 40, "intermediate_size_mlp": 32,
        "layer_types": ["chunked_attention", FULL], "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}),
    Family("DeepSeek-V3", "full, head_dim 192 and 128", "DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    Family("Phi", "full", "PhiConfig", "PhiForCausalLM"),
    Family("StarCoder 2", "window", "Starcoder2Config", "Starcoder2ForCausalLM", WINDOW),
    Family("Exaone 4", "window and full", "Exaone4Config", "Exaone4ForCausalLM", MIXED),
    Family("Seed-OSS", "full", "SeedOssConfig", "SeedOssForCausalLM"),
    Family("GPT-2", "full", "GPT2Config", "GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    Family("GPT-NeoX", "full", "GPTNeoXConfig", "GPTNeoXForCausalLM"),
    Family("OPT", "full", "OPTConfig", "OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    Family("Qwen3-Next", "full beside linear attention", "Qwen3NextConfig", "Qwen3NextForCausalLM", {
        **SHARED, "layer_types": ["linear_attention", FULL], "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8}, 1),
    Family("Qwen 3.5", "full beside linear attention", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {
        "layer_types": ["linear_attention", FULL], "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8}, 1),
    Family("LFM 2", "full beside convolutions", "Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", FULL]}, 1),
    Family("Jamba", "full beside Mamba", "JambaConfig", "JambaForCausalLM", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False,
        "mamba_d_state": 4, "mamba_dt_rank": 4}, 1, True),
    Family("Bamba", "full beside Mamba 2", "BambaConfig", "BambaForCausalLM", {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 16}, 1, True),
)  # fmt: skip

INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32}

REFUSED = (
    Family("DeepSeek-V3.2", "tokens that an indexer chooses", "DeepseekV32Config", "DeepseekV32ForCausalLM", INDEXED),
    Family("GLM-5", "tokens that an indexer chooses", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", INDEXED),
    Family("DeepSeek-V4", "window and compressed keys", "DeepseekV4Config", "DeepseekV4ForCausalLM", {
        **WINDOW, **INDEXED, "num_key_value_heads": 1}),
    Family("Falcon", "full", "FalconConfig", "FalconForCausalLM", {"head_dim": None}),
    Family("BLOOM", "full with ALiBi", "BloomConfig", "BloomForCausalLM", {"n_head": 4, "n_layer": 2}),
    Family("MPT", "full with ALiBi", "MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    Family("Mamba", "none", "MambaConfig", "MambaForCausalLM"),
    Family("T5", "encoder and decoder", "T5Config", "T5ForConditionalGeneration", {
        "d_model": 32, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8}),
)  # fmt: skip


def family_named(name: str) -> Family:
    """Return the family of a name."""
    return next(each for each in FAMILIES if each.name == name)


def row(family: Family, said: str) -> str:
    """Return a line of the table."""
    return f"| {family.name} | `{family.model}` | {family.pattern} | {said} |"


def refusal(family: Family) -> str:
    """Return the reason for which `dynaxx.apply` refuses a family."""
    import dynaxx as dx

    try:
        dx.apply(family.build())
    except dx.UnsupportedInputError as error:
        return re.sub(r"\s+", " ", "; ".join(reason for reasons in error.reasons.values() for reason in reasons))
    raise AssertionError(f"{family.name} is served")


def table(check: Callable[[Family], str]) -> list[str]:
    """Return the rows of all families."""
    return [row(each, check(each)) for each in FAMILIES] + [row(each, f"refused: {refusal(each)}") for each in REFUSED]


if __name__ == "__main__":
    HEAD, _, _ = PAGE.read_text(encoding="utf-8").partition("| family |")
    ROWS = table(lambda family: "served" if family.layers == 2 else "attention layers served")
    PAGE.write_text(
        HEAD
        + "\n".join(["| family | class | its layers | `dynaxx.apply(model)` |", "|---|---|---|---|", *ROWS])
        + "\n",
        encoding="utf-8",
    )
