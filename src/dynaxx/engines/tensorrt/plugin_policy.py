# SPDX-License-Identifier: Apache-2.0
"""Attention of a policy's layer, as a plugin of TensorRT calls it."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from dynaxx.integrations.runtime.routing import (
    CallProperties,
    LayerRules,
    PassState,
    Route,
    SequenceLengths,
    is_step,
    route,
)
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.patterns import Causal
from dynaxx.policy import LayerPlan, parse_policy, resolve

# The inputs of `dynaxx::sparse_attention` after q, k and v.
LAYOUT_INPUTS = ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks", "mask_bits", "mask_bands")


def layout_tensors(layout: BlockLayout) -> dict[str, Tensor]:
    """Return a layout as the inputs of `dynaxx::sparse_attention`, in their order: int32, contiguous, not empty.

    Their sizes are (layout_batch, layout_heads, q_blocks + 1), (layout_batch, layout_heads, q_blocks), (capacity,),
    (capacity,), (masks, q_block, words) and (masks, 2).
    """
    masks = layout.masks
    found = (layout.kv_indptr, layout.kv_num_partial, layout.kv_indices, layout.kv_masks, masks.bits, masks.bands)
    return dict(zip(LAYOUT_INPUTS, (_not_empty(x).contiguous() for x in found), strict=True))


def _not_empty(x: Tensor) -> Tensor:
    """Return a tensor with at least one entry in each dimension; TensorRT takes no empty shapes as layouts."""
    return x if x.numel() else x.new_zeros([max(1, size) for size in x.shape])


EXACT_BLOCK = 64


def attend_by_policy(q: Tensor, k: Tensor, v: Tensor, *, policy: str, layer: int, scale: float) -> Tensor:
    """Attend by the rule of a policy's layer where it applies, else to all keys before each query.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim of v).
        policy: the text of a policy.
        layer: index of the layer.
        scale: of the softmax.
    """
    plan, rules = rules_of(policy, layer)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    lengths = SequenceLengths(seqlen_q, seqlen_k, is_step(seqlen_q, seqlen_k))
    chosen = route(rules, PassState(None, False, False), CallProperties(serves_own_pattern=True), lengths).route
    if chosen is Route.RULE and plan is not None:
        layout = plan.layout(q, k, scale=scale)
    else:
        layout = Causal().layout(seqlen_q, seqlen_k, block_size=EXACT_BLOCK, device=q.device)
    return sparse_attention(q, k, v, layout, scale=scale)


@lru_cache(maxsize=64)
def rules_of(text: str, layer: int) -> tuple[LayerPlan | None, LayerRules]:
    """Return a layer's plan and when it applies.

    Raises:
        ValueError: the text is no policy, the layer is not in it, or it has something that a plugin cannot serve.
    """
    policy = parse_policy(text)
    if not 0 <= layer < policy.model.layers:
        raise ValueError(f"`layer` must be 0 to {policy.model.layers - 1}, got {layer}")
    plan, reasons = resolve(policy).get(layer), []
    if any(rule.phase == "decode" for rule in policy.rules):
        reasons.append("decode rules")
    if policy.rollout.share < 1 or policy.rollout.flag is not None:
        reasons.append("`rollout.share` and `rollout.flag`")
    if plan is not None and plan.needs_tokens:
        reasons.append("rules by content")
    if reasons:
        raise ValueError(f"a plugin of TensorRT cannot serve {', '.join(reasons)}: remove them from the policy")
    if not policy.rollout.covers_layer(layer):
        plan = None
    least = None if plan is None else 1 if plan.is_static else plan.block_size[0]
    borders = policy.dense_below, policy.sparse_from
    return plan, LayerRules(least, False, borders, policy.decode_borders, policy.rollout)
