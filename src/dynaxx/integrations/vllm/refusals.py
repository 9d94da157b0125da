# SPDX-License-Identifier: Apache-2.0
"""Why an engine cannot serve a policy rightly: each a sentence for the person who starts it.

Knows vLLM's configuration by the names of its fields alone, and imports none of it.
"""

from __future__ import annotations

from typing import Any

from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.policy import Policy

SERVED_CACHES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")


def policy_refusals(policy: Policy, ranks: int) -> list[str]:
    """Return what of a policy has no meaning in vLLM."""
    reasons = []
    if policy.rollout.share != 1.0 or policy.rollout.flag is not None:
        reasons.append(
            "`rollout.share` and `rollout.flag` choose requests by id, which vLLM does not hand to its backends: set "
            "share to 1.0 and send a part of the traffic to engines with a policy"
        )
    if policy.reuse > 1:
        reasons.append("`reuse` hands a selection from layer to layer, which is not done in vLLM: set it to 1")
    if policy.guard is not None and ranks > 1:
        reasons.append("`guard` watches whole layers, and tensor parallelism cuts them: remove it")
    return reasons


def config_refusals(vllm_config: Any) -> list[str]:
    """Why no policy can be served with such a configuration."""
    reasons = []
    cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
    if cache.cache_dtype not in SERVED_CACHES:
        reasons.append(f"kv cache dtype {cache.cache_dtype!r} is not served; use --kv-cache-dtype auto or fp8")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            reasons.append(f"{name} = {getattr(parallel, name)}: context parallelism is not served; use 1")
    if getattr(model, "rswa_window", None) is not None:
        reasons.append("the model's reference sliding window is not served")
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append("prefixes that see both ways are not served")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        reasons.append(f"speculative method {speculative.method!r}: a draft model has layers of its own; use ngram")
    return reasons


def deployed_refusals(vllm_config: Any, deployed: Deployed) -> list[str]:
    """Why some rules cannot be served with such a configuration."""
    reasons, size = [], vllm_config.cache_config.block_size
    content = [index for index, plan in deployed.plans.items() if plan.needs_tokens]
    if content:
        reasons.append(f"rules of layers {content} look at content: vLLM hands its backends no token ids")
    if not deployed.decode:
        return reasons
    wrong = sorted({plan.page_size for plan in deployed.decode.values()} - {size})
    if wrong:
        reasons.append(f"the kv cache has pages of {size} tokens, decode rules {wrong}; use --block-size {wrong[0]}")
    if vllm_config.kv_transfer_config is not None:
        reasons.append("decode rules: pages from a kv connector come without the summaries that choosing needs")
    return reasons


def layer_refusals(layer: Any, *, guarded: bool) -> list[str]:
    """Why one attention layer cannot follow a rule; `guarded` where a guard watches it."""
    impl, reasons = layer.impl, []
    if layer.attn_type != "decoder":
        reasons.append(f"its attention is of type {layer.attn_type!r}, not decoder")
    if getattr(impl, "alibi_slopes", None) is not None:
        reasons.append("it has ALiBi slopes")
    if guarded and (getattr(impl, "sinks", None) is not None or getattr(impl, "logits_soft_cap", None)):
        reasons.append("it has learned sinks or caps its scores, which `guard` does not measure: remove the guard")
    if layer.kv_sharing_target_layer_name is not None:
        reasons.append("it shares another layer's cache")
    if layer.head_size_v != layer.head_size:
        reasons.append("its keys and values differ in head_dim")
    return reasons
