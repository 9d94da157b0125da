# SPDX-License-Identifier: Apache-2.0
"""Trace a model with one operator for each layer's attention, and complete or replace the operators.

A model is traced once, with a node `dynaxx::SparseAttention` for each layer's attention. In the custom form the nodes
get their rules as attributes. In the portable form plain operators replace them: the attention of each kind of layer is
traced once, and its nodes are copied, which is ten times faster than tracing every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.engines.onnx.graph import trace
from dynaxx.engines.onnx.plans import OperatorPlan
from dynaxx.engines.portable.attention import Known, attend_by_rules, bias_of
from dynaxx.engines.portable.plans import PortableRules
from dynaxx.engines.portable.rules import GatherRule

DOMAIN, OPERATOR = "dynaxx", "SparseAttention"


def attend_by_operator(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, tokens_first: bool = False
) -> Tensor:
    """Add the operator to the traced graph without computing anything: q (B, Hq, Lq, D) -> (B, Lq, Hq, E).

    With `tokens_first`, it is that of an encoder: it reads q, k and v as linear layers write them, (B, L, H, D), and
    the mask of tokens (B, L), if given. In the portable form, an encoder's mask is in the bias, from the model's input.
    """
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    inputs = [q, k, v]
    attributes: dict[str, Any] = {"layer": layer, "scale": float(scale)}
    if tokens_first:
        inputs = [x.transpose(1, 2) for x in inputs] + ([] if mask is None else [mask])
        attributes |= {"causal": 0, "tokens_first": 1}
    found: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OPERATOR}", inputs, attributes, dtype=q.dtype, shape=shape, version=1
    )
    return found


def with_plans(graph: Any, plans: Mapping[int, OperatorPlan]) -> Any:
    """Return a copy of a traced graph whose operators have their rules as attributes."""
    import onnx_ir as ir

    made = graph.clone()
    for node in _operators(made):
        plan = plans[node.attributes["layer"].as_int()]
        if plan.plan:
            node.attributes.add(ir.AttrInt64s("plan", list(plan.plan)))
        node.attributes.add(ir.AttrInt64("sparse_from", plan.sparse_from))
        node.attributes.add(ir.AttrInt64("always", int(plan.always)))
        node.attributes.add(ir.AttrString("rule", plan.rule))
    return made


def with_plain_operators(graph: Any, rules: Mapping[int, PortableRules], *, causal: bool) -> Any:
    """Return a copy of a traced graph with plain operators only."""
    made = graph.clone()
    main = made.graph
    lengths = [each for each in main.inputs if each.name in ("input_ids", "past_key.0", "attention_mask")]
    first = next(iter(main))
    kinds: dict[Any, Any] = {}
    biases: dict[GatherRule | None, Any] = {}
    for node in _operators(made):
        layer, scale = node.attributes["layer"].as_int(), node.attributes["scale"].as_float()
        rule = rules[layer]
        needed = list(dict.fromkeys(part.rule for part in rule.parts))
        for each in needed:
            if each not in biases:
                traced = _trace_bias(each, causal)
                (biases[each],) = _insert(traced, lengths, main, first, f"bias{len(biases)}")
        shapes = tuple(tuple(size for size in value.shape if isinstance(size, int)) for value in node.inputs)
        key = rule, scale, shapes
        if key not in kinds:
            kinds[key] = _trace_attention(rule, needed, scale, node.inputs, causal)
        inputs = [*node.inputs, *(biases[each] for each in needed)]
        (out,) = _insert(kinds[key], inputs, main, node, f"attention{layer}")
        out.shape, out.type = node.outputs[0].shape, node.outputs[0].type
        node.outputs[0].replace_all_uses_with(out)
        main.remove(node, safe=True)
    made.graph.opset_imports.pop(DOMAIN, None)
    return made


def _operators(model: Any) -> list[Any]:
    return [node for node in model.graph if node.domain == DOMAIN and node.op_type == OPERATOR]


class _Bias(nn.Module):
    def __init__(self, rule: GatherRule | None, causal: bool) -> None:
        super().__init__()
        self.rule, self.causal = rule, causal

    def forward(self, input_ids: Tensor, other: Tensor) -> Tensor | None:
        """Return the bias from a model's inputs, see `bias_of`.

        Args:
            input_ids: (B, L).
            other: a decoder's cached keys (B, Hk, cached, D), or an encoder's mask (B, L).
        """
        seqlen = input_ids.shape[1]
        seqlen_k = seqlen + other.shape[2] if self.causal else seqlen
        mask = None if self.causal else other.to(torch.bool)
        return bias_of(self.rule, seqlen, seqlen_k, torch.float32, causal=self.causal, key_mask=mask)


class _OperatorAttention(nn.Module):
    def __init__(self, rules: PortableRules, needed: list[GatherRule | None], scale: float, causal: bool) -> None:
        super().__init__()
        self.rules, self.needed, self.scale, self.causal = rules, needed, scale, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor]) -> Tensor:
        known: Known = dict(zip(self.needed, biases, strict=True))
        return attend_by_rules(self.rules, q, k, v, self.scale, None, causal=self.causal, known=known)


def _trace_bias(rule: GatherRule | None, causal: bool) -> Any:
    ids = torch.zeros(2, 160, dtype=torch.int64, device="cpu")
    other = torch.zeros(2, 3, 48, 5, dtype=torch.float32, device="cpu") if causal else torch.ones_like(ids)
    of_other = {0: "batch", 1: "kv_heads", 2: "past", 3: "head_dim"} if causal else {0: "batch", 1: "seqlen"}
    return trace(_Bias(rule, causal), (ids, other), ({0: "batch", 1: "seqlen"}, of_other), ["ids", "other"], ["bias"])


def _trace_attention(
    rules: PortableRules, needed: list[GatherRule | None], scale: float, inputs: Any, causal: bool
) -> Any:
    seqlen_q, seqlen_k = 160, 208 if causal else 160
    q, k, v = (
        torch.zeros(2, value.shape[1], seqlen, value.shape[3], dtype=torch.float32, device="cpu")
        for value, seqlen in zip(inputs, (seqlen_q, seqlen_k, seqlen_k), strict=True)
    )
    keys = "keys" if causal else "seqlen"
    mask = None if causal else torch.ones(2, seqlen_k, dtype=torch.bool, device="cpu")
    biases = [bias_of(each, seqlen_q, seqlen_k, torch.float32, causal=causal, key_mask=mask) for each in needed]
    of_batch = {} if causal else {0: "batch"}
    of_bias = [
        {**of_batch, 2: f"tiles{i}"} if each is not None else {**of_batch, **({3: "seqlen"} if causal else {}), 4: keys}
        for i, each in enumerate(needed)
    ]
    sides = {0: "batch", 2: "seqlen"}, {0: "batch", 2: keys}
    names = ["q", "k", "v", *(f"bias{i}" for i in range(len(needed)))]
    module = _OperatorAttention(rules, needed, scale, causal)
    return trace(module, (q, k, v, biases), (sides[0], sides[1], sides[1], of_bias), names, ["out"])


def _insert(traced: Any, inputs: list[Any], main: Any, before: Any, prefix: str) -> list[Any]:
    """Copy a traced graph's nodes before a node of another graph, and return the copied outputs."""
    own = traced.graph.clone()
    if len(own.inputs) != len(inputs):
        raise AssertionError(f"{prefix} was traced with {len(own.inputs)} inputs, got {len(inputs)}")
    for name, value in list(own.initializers.items()):
        own.initializers.pop(name)
        value.name = f"{prefix}.{name}"
        main.register_initializer(value)
    for inner, outer in zip(own.inputs, inputs, strict=True):
        inner.replace_all_uses_with(outer)
    outputs = list(own.outputs)
    own.outputs.clear()
    nodes = list(own)
    own.remove(nodes)
    for node in nodes:
        node.name = f"{prefix}.{node.name}"
        for value in node.outputs:
            value.name, value.shape = f"{prefix}.{value.name}", None
    main.insert_before(before, nodes)
    return outputs
