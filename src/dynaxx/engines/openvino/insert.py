# SPDX-License-Identifier: Apache-2.0
"""`insert_policy`: replace the attention of an OpenVINO model with dynaxx's, in place, before it is compiled.

It replaces OpenVINO's attention nodes, `ScaledDotProductAttention`, one per layer of a decoder. Keys that are repeated
for grouped heads are read before the repetition.

    k (B, Hk, M, D) -> Unsqueeze -> Broadcast -> Reshape -> SDPA -> Transpose -> ...
    k ------------------------------------> SparseAttention --------------------> ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.engines.openvino.convert import CAUSAL, openvino
from dynaxx.engines.openvino.running import OpenVinoHandle, cpu_config
from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.runtime.policy_events import without_guard
from dynaxx.policy import Policy, resolve

ATTENTION = "ScaledDotProductAttention"
REPEATING = ("Reshape", "Broadcast", "Unsqueeze", "Tile")


@typed
def insert_policy(model: Any, policy: Policy, *, precision: str = "f32", name: str = "openvino") -> OpenVinoHandle:
    """Run the attention of an OpenVINO model on dynaxx, with a policy where it applies and exactly elsewhere.

    Compile the model afterwards for the CPU with `cpu_config(precision)`. The operator exists only in this process, so
    the model can be compiled and run but not saved.

    Args:
        model: an `openvino.Model` of a decoder from `to_openvino` or OpenVINO's converters.
        policy: policy for the original model. A guard is left out, with a warning.
        precision: compile precision, "f32" or "bf16".
        name: name of the model in metrics, `model_name`.

    Returns:
        A handle with counters and a kill switch.

    Raises:
        ImportError: openvino is not installed.
        TypeError: not an OpenVINO model.
        PolicyError: the policy is for a model of another shape.
        UnsupportedInputError: the model or the policy is not supported.
    """
    ov = openvino()
    if not isinstance(model, ov.Model):
        raise TypeError(f"`model` must be an openvino.Model, got {type(model).__name__}; to_openvino makes one")
    if precision not in ("f32", "bf16"):
        raise ValueError(f'`precision` must be "f32" or "bf16", got {precision!r}')
    from dynaxx.engines.openvino.operator import CausalMask, SparseAttention

    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == ATTENTION]
    policy = without_guard(policy, "OpenVINO")
    _check(policy, nodes)
    last_aligned = model.has_rt_info(CAUSAL)
    answers: dict[tuple[str, int], list[Any]] = {}  # masks and whether they are causal, by their source
    handle = OpenVinoHandle(policy, half=precision == "bf16", name=name)
    for layer, node in enumerate(nodes):
        inputs = [node.input(i).get_source_output() for i in range(node.get_input_size())]
        q, k, v = inputs[0], _before_repetition(inputs[1]), _before_repetition(inputs[2])
        first_aligned = node.get_attributes()["causal"] and not last_aligned
        mask: list[Any] = []
        if len(inputs) > 3 and not (last_aligned or first_aligned):  # otherwise OpenVINO reads no mask either
            source = inputs[3].get_node().get_name(), inputs[3].get_index()
            if source not in answers:
                answers[source] = [inputs[3], CausalMask([inputs[3]]).output(0)]
            mask = answers[source]
        inside = SparseAttention([q, k, v, *mask], handle, layer, _scale(inputs), first_aligned)
        last, transposed = _after(node)
        if not transposed:  # the readers expect heads before tokens
            order = ov.opset13.constant([0, 2, 1, 3], ov.Type.i64)
            inside = ov.opset13.transpose(inside.output(0), order)
        for reader in list(last.output(0).get_target_inputs()):
            reader.replace_source_output(inside.output(0))
    model.validate_nodes_and_infer_types()
    handle.layers = len(nodes)
    return handle


def _check(policy: Policy, nodes: list[Any]) -> None:
    """Raise PolicyError or UnsupportedInputError if a policy is not for a model with these attention nodes."""
    facts, reasons = policy.model, []
    if not nodes:
        reasons.append(f"the model has no {ATTENTION} node: convert it with to_openvino, or from SDPA attention")
    both_sides = [layer for layer, node in enumerate(nodes) if _sees_later_keys(node)]
    if both_sides:
        reasons.append(f"attentions {both_sides} have no mask and are not causal, and a policy is for causal decoders")
    if any(rule.phase == "decode" for rule in policy.rules):
        reasons.append("decode rules need a cache that dynaxx can read: remove them")
    if policy.rollout.share < 1.0 or policy.rollout.flag is not None:
        reasons.append(
            "`rollout.share` and `rollout.flag` depend on the request, which OpenVINO does not pass on: remove them"
        )
    if any(plan.needs_tokens for plan in resolve(policy).values()):
        reasons.append("rules by content need the token ids, which attention does not receive")
    if reasons:
        raise UnsupportedInputError("a policy inside OpenVINO", {"openvino": reasons})
    if len(nodes) != facts.layers:
        raise PolicyError(f"`model.layers` is {facts.layers} in the policy, and the model has {len(nodes)} attentions")
    for layer, node in enumerate(nodes):
        heads = {"q_heads": (0, facts.q_heads), "kv_heads": (1, facts.kv_heads)}
        for field, (index, wanted) in heads.items():
            source = node.input(index).get_source_output()
            shape = (source if index == 0 else _before_repetition(source)).get_partial_shape()
            if shape.rank.is_static and shape.rank.get_length() != 4:
                raise UnsupportedInputError(
                    "this model", {"openvino": [f"attention {layer} has no (B, H, N, D) inputs"]}
                )
            for name, at, expected in ((field, 1, wanted), ("head_dim", 3, facts.head_dim)):
                if shape[at].is_static and shape[at].get_length() != expected:
                    raise PolicyError(
                        f"`model.{name}` is {expected} in the policy and {shape[at].get_length()} in layer {layer}: "
                        "the policy is for another model; tune a policy for this model"
                    )


def _sees_later_keys(node: Any) -> bool:
    """Return whether an attention node has neither a mask nor the flag "causal", and more than one query."""
    queries = node.get_input_partial_shape(0)[2]
    one = queries.is_static and queries.get_length() == 1
    return node.get_input_size() < 4 and not node.get_attributes()["causal"] and not one


def _before_repetition(output: Any) -> Any:
    """Return the keys or values before their repetition for grouped heads, or unchanged if they are not repeated."""
    node, repeated = output.get_node(), False
    while node.get_type_name() in REPEATING:
        repeated |= node.get_type_name() in ("Broadcast", "Tile")
        node = node.input(0).get_source_output().get_node()
    found = node.output(0)
    rank = found.get_partial_shape().rank
    return found if repeated and rank.is_static and rank.get_length() == 4 else output


def _after(node: Any) -> tuple[Any, bool]:
    """Return the last node that only transposes the result, and whether it puts tokens before heads."""
    while True:
        readers = list(node.output(0).get_target_inputs())
        if len(readers) != 1:
            return node, False
        after = readers[0].get_node()
        if after.get_type_name() == "Transpose":
            order = after.input(1).get_source_output().get_node()
            turned = order.get_type_name() == "Constant" and list(order.get_vector()) == [0, 2, 1, 3]
            return (after, True) if turned else (node, False)
        before, now = node.output(0).get_partial_shape(), after.output(0).get_partial_shape()
        if after.get_type_name() != "Reshape" or str(before) != str(now) or before.rank.get_length() != 4:
            return node, False
        node = after


def _scale(inputs: list[Any]) -> float | None:
    """Return the softmax scale of an attention node, or None for head_dim ** -0.5."""
    if len(inputs) < 5:
        return None
    node = inputs[4].get_node()
    while node.get_type_name() in ("Convert", "Reshape", "Squeeze"):
        node = node.input(0).get_source_output().get_node()
    if node.get_type_name() != "Constant":
        raise UnsupportedInputError("this model", {"openvino": ["the scale of an attention is not a constant"]})
    return float(node.get_data().reshape(-1)[0])


class OpenVinoPrompts:
    """Compute the logits of prompts: dense in OpenVINO below the policy's border, and with the policy from there on.

    One compiled model with a policy inside computes short prompts exactly, on dynaxx's kernels, which costs a
    conversion on both sides of them in bf16. Two compiled models avoid that, and hold the weights twice. Each is
    compiled when the first prompt needs it.

    Args:
        model: a dense `openvino.Model` without a cache, from `to_openvino`. It is not changed.
        policy: policy for the original model.
        precision: "f32" or "bf16".
        threads: number of threads; `torch.get_num_threads()` by default.
        name: name of the model in metrics, `model_name`.

    Attributes:
        border: number of tokens from which the policy runs.
        handle: counts and kill switch of the policy.

    Raises:
        ImportError, TypeError, PolicyError, UnsupportedInputError: as `insert_policy`.
    """

    @typed
    def __init__(
        self,
        model: Any,
        policy: Policy,
        *,
        precision: str = "f32",
        threads: int | None = None,
        name: str = "openvino",
    ) -> None:
        self._dense = model
        self._sparse = model.clone()
        self.handle: OpenVinoHandle = insert_policy(self._sparse, policy, precision=precision, name=name)
        self.border = policy.border
        self._config = cpu_config(precision, threads)
        self._requests: dict[bool, Any] = {}

    def __call__(self, input_ids: NDArray[Any] | Tensor) -> NDArray[Any]:
        """Return the logits of prompts (batch, seqlen) of one length."""
        ids = np.ascontiguousarray(np.asarray(input_ids, dtype=np.int64))
        sparse = ids.shape[1] >= self.border
        if sparse not in self._requests:
            model = self._sparse if sparse else self._dense
            self._requests[sparse] = openvino().Core().compile_model(model, "CPU", self._config).create_infer_request()
        return np.array(self._requests[sparse].infer({0: ids})[0])
