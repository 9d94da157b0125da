# SPDX-License-Identifier: Apache-2.0
"""Encode the rules of each layer as the integers that `dynaxx::SparseAttention` reads."""

from __future__ import annotations

import struct
from typing import NamedTuple

from torch import nn

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.portable.plans import MOST_REASONS, is_causal, own_window
from dynaxx.integrations.portable.rules import LONG
from dynaxx.integrations.transformers.decoder import Decoder
from dynaxx.layout import BlockGrid
from dynaxx.patterns import Pattern, SlidingWindow
from dynaxx.policy import LayerPlan, Policy, resolve
from dynaxx.policy.rule_parts import budget_of, parts
from dynaxx.selection import MeanPool, MeanQuery, MinMax, Selector, TopK

BLOCK = (64, 64)  # block size of the model's own windows
SCORERS = {MeanQuery: 0, MeanPool: 1, MinMax: 2}  # as in source/layer_rules.h


class OperatorPlan(NamedTuple):
    """The attributes of one layer's operator.

    Attributes:
        plan: the encoded rules, or () if all keys are visible.
        sparse_from: number of keys from which the rules apply.
        always: whether the rules apply at every length and in decoding, as a model's own window does.
        rule: readable form of the rules.
    """

    plan: tuple[int, ...] = ()
    sparse_from: int = 0
    always: bool = False
    rule: str = "all keys"


def operator_plans(model: nn.Module, policy: Policy | None) -> dict[int, OperatorPlan]:
    """Return the operator's plan for every layer.

    Raises:
        PolicyError: the policy is for another model.
        UnsupportedInputError: the operator does not support the rules.
    """
    decoder = Decoder.of(model)
    reasons = [] if is_causal(decoder) else ["an encoder needs form='portable' and a `window`"]
    if policy is not None and not reasons:
        decoder.check(policy)
        if any(rule.phase == "decode" and rule.attention.kind != "dense" for rule in policy.rules):
            reasons.append("decode rules need summaries of pages, which the operator does not have: remove them")
        if policy.reuse > 1:
            reasons.append("`reuse` must be 1, because each layer selects on its own: set it to 1")
    border = 0 if policy is None else (policy.sparse_from or policy.dense_below)
    resolved = {} if policy is None or reasons else resolve(policy)
    plans = {}
    for index in decoder.layers:
        own = own_window(decoder, index)
        if own is not None and index in resolved:
            reasons.append(f"layer {index} has its own window and a rule: remove the rule")
        elif own is not None:
            window = SlidingWindow(own)
            group = [*range(decoder.facts.q_heads)]
            numbers = (*BLOCK, 1, len(group), *group, *_listed(_program(window, BLOCK)), 0)
            plans[index] = OperatorPlan(numbers, always=True, rule=repr(window))
        elif index in resolved:
            try:
                plans[index] = _plan(resolved[index], border)
            except ValueError as error:
                reasons.append(f"layer {index}: {error}")
        else:
            plans[index] = OperatorPlan()
    if reasons:
        shown = reasons[:MOST_REASONS] + [f"and {len(reasons) - MOST_REASONS} more"] * (len(reasons) > MOST_REASONS)
        raise UnsupportedInputError(f"an export of {decoder.facts.model_type} with the custom op", {"onnx": shown})
    return plans


def _plan(plan: LayerPlan, border: int) -> OperatorPlan:
    numbers: list[int] = [*plan.block_size, len(plan.groups)]
    for group in plan.groups:
        pattern, selector = parts(group.rule)
        program = [] if pattern is None else _program(pattern, plan.block_size)
        numbers += [len(group.heads), *group.heads, *_listed(program), int(selector is not None)]
        numbers += [] if selector is None else _choice(selector)
    rule = "; ".join(f"heads {','.join(map(str, group.heads))}: {group.rule!r}" for group in plan.groups)
    return OperatorPlan(tuple(numbers), border, False, rule)


def _program(pattern: Pattern, block_size: tuple[int, int]) -> list[int]:
    found = []
    for seqlen in (LONG, LONG // 2):
        grid = BlockGrid(seqlen, seqlen, block_size, True)
        found.append(None if pattern.needs_tokens else pattern.within_causality(grid).program(grid))
    if found[0] is None or found[0] != found[1]:
        raise ValueError(f"{pattern!r} depends on the request: use windows, sinks, strides or global tokens")
    return found[0]


def _choice(selector: Selector) -> list[int]:
    kind = SCORERS.get(type(selector.scorer))
    if not isinstance(selector, TopK) or kind is None:
        raise ValueError(
            f"{selector!r} is not supported by the operator, which has TopK with MeanQuery, MeanPool or MinMax: run "
            "this policy with dynaxx.apply, or tune a policy with these scorers"
        )
    scorer = selector.scorer
    if getattr(scorer, "pool", None) is not None or getattr(scorer, "precision", "full") != "full":
        raise ValueError(f"{scorer!r} must pool whole blocks in full precision")
    parameter = float(getattr(scorer, "sharpness", getattr(scorer, "bound", 0.0)))
    budget = budget_of(selector)
    budgets = budget if isinstance(budget, tuple) else (budget,)
    kinds = {isinstance(each, float) for each in budgets}
    if len(kinds) > 1:
        raise ValueError(f"{selector!r} mixes shares and numbers of blocks")
    together = selector.per == "group"
    values = [_bits(float(each)) for each in budgets]
    return [kind, _bits(parameter), int(kinds == {True}), int(together), selector.floor, *_listed(values)]


def _listed(numbers: list[int]) -> list[int]:
    return [len(numbers), *numbers]


def _bits(value: float) -> int:
    """Return the 64 bits of a float as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
