# SPDX-License-Identifier: Apache-2.0
"""Plugins of TensorRT: exact attention over a layout as ahead-of-time PTX, and a policy's layer as a call of Python.

    dynaxx::sparse_attention(q, k, v, layout...) -> out, lse      AOT: the engine holds the PTX and runs without Python
    dynaxx::policy_attention(q, k, v) -> out                      JIT: dynaxx chooses and attends while the engine runs

q is (batch, seqlen_q, q_heads, head_dim), k and v are (batch, seqlen_k, kv_heads, head_dim), contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.integrations.runtime.routing import Arrived, LayerRules, PassState, Route, is_step, route
from dynaxx.integrations.runtime.routing import Sequence as Lengths
from dynaxx.layout import BlockLayout
from dynaxx.ops import sparse_attention
from dynaxx.patterns import Causal
from dynaxx.policy import LayerPlan, Policy, parse_policy, policy_text, resolve

NAMESPACE = "dynaxx"
# The inputs of `dynaxx::sparse_attention` after q, k and v.
LAYOUT_INPUTS = ("kv_indptr", "kv_num_partial", "kv_indices", "kv_masks", "mask_bits", "mask_bands")
EXACT_BLOCK = 64


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


def register_plugins() -> ModuleType:
    """Register both plugins with TensorRT, once per process, and return `tensorrt.plugin.op.dynaxx`.

    Build with it: `network.add_plugin(ops.sparse_attention(q, k, v, *layout, ...), aot=True)`. A process that runs an
    engine with `policy_attention` must call this first; one with `sparse_attention` needs neither dynaxx nor Python.

    Raises:
        ImportError: TensorRT with `tensorrt.plugin` is not installed.
    """
    try:
        from dynaxx.integrations.tensorrt.plugin_definitions import OPERATORS
    except ImportError as error:
        raise ImportError(
            f"TensorRT's Python package with `tensorrt.plugin` does not import ({error}): install TensorRT, "
            "10.8 or newer, with its libraries. TensorRT for RTX has no plugins"
        ) from error
    found: ModuleType = OPERATORS
    return found


@typed
def add_sparse_attention(
    network: Any,
    q: Any,
    k: Any,
    v: Any,
    layout: Sequence[Any],
    *,
    block_size: tuple[int, int],
    scale: float,
    capability: int = 0,
) -> tuple[Any, Any]:
    """Add exact attention over a layout to a network; return the tensors of out and lse.

    Args:
        network: a `tensorrt.INetworkDefinition`.
        q: its tensor of queries, fp32, fp16 or bf16, with a fixed head_dim.
        k: its tensor of keys.
        v: its tensor of values.
        layout: its tensors for `LAYOUT_INPUTS`, int32; what is in them comes from `layout_tensors` at run time.
        block_size: of the layouts.
        scale: of the softmax, > 0.
        capability: of the card, such as 90; by default that of this machine's GPU.

    Raises:
        ImportError: TensorRT is not installed.
        ValueError: TensorRT refused the layer, or an argument is wrong.
    """
    if len(layout) != len(LAYOUT_INPUTS):
        raise ValueError(
            f"`layout` must hold {len(LAYOUT_INPUTS)} tensors, {', '.join(LAYOUT_INPUTS)}, got {len(layout)}"
        )
    if not scale > 0:
        raise ValueError(f"`scale` must be > 0, got {scale}")
    attributes = {"scale": float(scale), "q_block": int(block_size[0]), "kv_block": int(block_size[1])}
    made = register_plugins().sparse_attention(q, k, v, *layout, **attributes, capability=int(capability))
    return _outputs(network.add_plugin(made, aot=True), 2)


@typed
def add_policy_attention(network: Any, q: Any, k: Any, v: Any, *, policy: Policy, layer: int, scale: float) -> Any:
    """Add the attention of a policy's layer to a network; return the tensor of out.

    Args:
        network: a `tensorrt.INetworkDefinition`.
        q: its tensor of queries.
        k: its tensor of keys.
        v: its tensor of values.
        policy: decides by rule and length; prompts below its border, and tokens one by one, see all keys.
        layer: index of the layer.
        scale: of the softmax.

    Raises:
        ImportError: TensorRT is not installed.
        ValueError: TensorRT refused the layer, or the policy has something that a plugin cannot serve.
    """
    text = policy_text(policy)
    _rules_of(text, layer)
    made = register_plugins().policy_attention(q, k, v, policy=text, layer=layer, scale=float(scale))
    return _outputs(network.add_plugin(made, aot=False), 1)[0]


def _outputs(layer: Any, count: int) -> tuple[Any, ...]:
    if layer is None:
        raise ValueError("TensorRT refused the plugin layer; its log says why")
    return tuple(layer.get_output(i) for i in range(count))


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
    plan, rules = _rules_of(policy, layer)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    lengths = Lengths(seqlen_q, seqlen_k, is_step(seqlen_q, seqlen_k))
    chosen = route(rules, PassState(None, False, False), Arrived(native=True), lengths).route
    if chosen is Route.RULE and plan is not None:
        layout = plan.layout(q, k, scale=scale)
    else:
        layout = Causal().layout(seqlen_q, seqlen_k, block_size=EXACT_BLOCK, device=q.device)
    return sparse_attention(q, k, v, layout, scale=scale)


@lru_cache(maxsize=64)
def _rules_of(text: str, layer: int) -> tuple[LayerPlan | None, LayerRules]:
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
    if policy.reuse > 1:
        reasons.append("`reuse`")
    if policy.guard is not None:
        reasons.append("`guard`")
    if policy.rollout.share < 1 or policy.rollout.flag is not None:
        reasons.append("`rollout.share` and `rollout.flag`")
    if plan is not None and plan.needs_tokens:
        reasons.append("rules by content")
    if reasons:
        raise ValueError(f"a plugin of TensorRT cannot serve {', '.join(reasons)}: remove them from the policy")
    if not policy.rollout.covers_layer(layer):
        plan = None
    block = None if plan is None else plan.block_size[0]
    borders = policy.dense_below, policy.sparse_from
    return plan, LayerRules(block, False, borders, policy.decode_borders, policy.rollout)
