# SPDX-License-Identifier: Apache-2.0
"""Plugins of TensorRT: exact attention over a layout as ahead-of-time PTX, and a policy's layer as a call of Python.

    dynaxx::sparse_attention(q, k, v, layout...) -> out, lse      AOT: the engine holds the PTX and runs without Python
    dynaxx::policy_attention(q, k, v) -> out                      JIT: dynaxx chooses and attends while the engine runs

q is (batch, seqlen_q, q_heads, head_dim), k and v are (batch, seqlen_k, kv_heads, head_dim), contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dynaxx.arguments import typed
from dynaxx.engines.tensorrt.plugin_policy import LAYOUT_INPUTS, rules_of
from dynaxx.integrations.runtime.policy_events import without_guard
from dynaxx.policy import Policy, policy_text


def register_plugins() -> ModuleType:
    """Register both plugins with TensorRT, once per process, and return `tensorrt.plugin.op.dynaxx`.

    Build with it: `network.add_plugin(ops.sparse_attention(q, k, v, *layout, ...), aot=True)`. A process that runs an
    engine with `policy_attention` must call this first; one with `sparse_attention` needs neither dynaxx nor Python.

    Raises:
        ImportError: TensorRT with `tensorrt.plugin` is not installed.
    """
    try:
        from dynaxx.engines.tensorrt.plugin_definitions import OPERATORS
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
    text = policy_text(without_guard(policy, "TensorRT"))
    rules_of(text, layer)
    made = register_plugins().policy_attention(q, k, v, policy=text, layer=layer, scale=float(scale))
    return _outputs(network.add_plugin(made, aot=False), 1)[0]


def _outputs(layer: Any, count: int) -> tuple[Any, ...]:
    if layer is None:
        raise ValueError("TensorRT refused the plugin layer; its log says why")
    return tuple(layer.get_output(i) for i in range(count))
