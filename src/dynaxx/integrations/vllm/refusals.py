# SPDX-License-Identifier: Apache-2.0
"""Reasons why an engine cannot serve a policy exactly, as sentences for the person who starts it.

This module uses vLLM's configuration by field names and does not import vLLM.
"""

from __future__ import annotations

from typing import Any

from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.policy import Policy

SERVED_CACHES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")


def policy_refusals(policy: Policy, ranks: int) -> list[str]:
    """Return the reasons why vLLM cannot serve the settings of a policy."""
    reasons = []
    if policy.rollout.share != 1.0 or policy.rollout.flag is not None:
        reasons.append(
            "`rollout.share` and `rollout.flag` choose requests by id, which vLLM does not pass to its backends; set "
            "share to 1.0, remove the flag, and send a part of the traffic to engines with a policy"
        )
    if policy.guard is not None and ranks > 1:
        reasons.append("`guard` watches whole layers, but tensor parallelism splits them; remove it")
    return reasons


def config_refusals(vllm_config: Any) -> list[str]:
    """Return the reasons why no policy can be served with this configuration."""
    reasons = []
    cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
    if cache.cache_dtype not in SERVED_CACHES:
        reasons.append(f"kv cache dtype {cache.cache_dtype!r} is not supported; use --kv-cache-dtype auto or fp8")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            reasons.append(f"{name} = {getattr(parallel, name)}: context parallelism is not supported; use 1")
    if getattr(model, "rswa_window", None) is not None:
        reasons.append("the model's reference sliding window is not supported")
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append("prefixes with bidirectional attention are not supported")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        reasons.append(f"speculative method {speculative.method!r}: draft models are not supported; use ngram")
    return reasons


def deployed_refusals(vllm_config: Any, deployed: Deployed) -> list[str]:
    """Return the reasons why some rules cannot be served with this configuration."""
    reasons, size = [], vllm_config.cache_config.block_size
    content = [index for index, plan in deployed.plans.items() if plan.needs_tokens]
    if content:
        reasons.append(f"rules of layers {content} need token ids, which vLLM does not pass to its backends")
    if not deployed.decode:
        return reasons
    wrong = sorted({plan.page_size for plan in deployed.decode.values()} - {size})
    if wrong:
        reasons.append(f"the kv cache has pages of {size} tokens, decode rules {wrong}; use --block-size {wrong[0]}")
    if vllm_config.kv_transfer_config is not None:
        reasons.append("decode rules need page summaries, which pages from a kv connector lack; remove one of them")
    return reasons


def layer_refusals(layer: Any, *, guarded: bool) -> list[str]:
    """Return the reasons why an attention layer cannot follow a rule. `guarded` means that a guard watches it."""
    impl, reasons = layer.impl, []
    if layer.attn_type != "decoder":
        reasons.append(f"its attention is of type {layer.attn_type!r}, not decoder")
    if getattr(impl, "alibi_slopes", None) is not None:
        reasons.append("it has ALiBi slopes")
    if guarded and (getattr(impl, "sinks", None) is not None or getattr(impl, "logits_soft_cap", None)):
        reasons.append("it has learned sinks or capped scores, which `guard` cannot measure; remove the guard")
    if layer.kv_sharing_target_layer_name is not None:
        reasons.append("it shares another layer's cache")
    if layer.head_size_v != layer.head_size:
        reasons.append("its keys and values differ in head_dim")
    return reasons
