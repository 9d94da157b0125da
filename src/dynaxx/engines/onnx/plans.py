# SPDX-License-Identifier: Apache-2.0
"""Encode the rules of each layer as the integers that `dynaxx::SparseAttention` reads."""

from __future__ import annotations

import struct
from typing import NamedTuple

from torch import nn

from dynaxx.engines.portable.plans import check_reasons, is_causal, own_window
from dynaxx.engines.portable.rules import LONG, operands
from dynaxx.integrations.transformers.decoder import Decoder
from dynaxx.layout import BlockGrid
from dynaxx.patterns import Pattern, SlidingWindow
from dynaxx.patterns.program import Op
from dynaxx.policy import LayerPlan, Policy, resolve
from dynaxx.policy.specs import budget_of, parts
from dynaxx.selection import MeanPool, MeanQuery, MinMax, Selector, TopK

BLOCK = (64, 64)  # block size of the model's own windows
WIDE_BLOCK = (128, 128)  # the same for encoders with windows of 128 keys and more: 5 % faster on AVX-512 than 64
CUSTOM = "onnx", "with the custom op"
SCORERS = {MeanQuery: 0, MeanPool: 1, MinMax: 2}  # as in source/layer_rules.h


class OperatorPlan(NamedTuple):
    """The attributes of one layer's operator."""

    plan: tuple[int, ...] = ()  # the encoded rules, or () if all keys are visible
    sparse_from: int = 0  # number of keys from which the rules apply
    always: bool = False  # whether the rules apply at every length and in decoding, as a model's own window does
    rule: str = "all keys"  # readable form of the rules


def operator_plans(
    model: nn.Module, policy: Policy | None, window: int | tuple[int, int] | None = None
) -> dict[int, OperatorPlan]:
    """Return the operator's plan for every layer. `window` is an encoder's, as for `dynaxx.apply`.

    Raises:
        PolicyError: the policy is for another model.
        UnsupportedInputError: the operator does not support the rules.
    """
    decoder = Decoder.of(model)
    if not is_causal(decoder):
        return _encoder_plans(decoder, policy, window)
    reasons = []
    if window is not None:
        reasons.append("`window` is for encoders: give a decoder a policy with a SlidingWindow rule")
    if policy is not None and not reasons:
        decoder.check(policy)
        if any(rule.phase == "decode" and rule.attention.build() is not None for rule in policy.rules):
            reasons.append("decode rules need summaries of pages, which the operator does not have: remove them")
    border = 0 if policy is None else policy.border
    resolved = {} if policy is None or reasons else resolve(policy)
    plans = {}
    for index in decoder.layers:
        own = own_window(decoder, index)
        if own is not None and index in resolved:
            reasons.append(f"layer {index} has its own window and a rule: remove the rule")
        elif own is not None:
            plans[index] = _window_plan(SlidingWindow(own), decoder.facts.q_heads, BLOCK, causal=True)
        elif index in resolved:
            try:
                plans[index] = _plan(resolved[index], border)
            except ValueError as error:
                reasons.append(f"layer {index}: {error}")
        else:
            plans[index] = OperatorPlan()
    check_reasons(CUSTOM, decoder, reasons)
    return plans


def _encoder_plans(
    decoder: Decoder, policy: Policy | None, window: int | tuple[int, int] | None
) -> dict[int, OperatorPlan]:
    check_reasons(CUSTOM, decoder, ["a policy is for decoders: give an encoder a `window`"] * (policy is not None))
    plans = {}
    for index in decoder.layers:
        own = own_window(decoder, index)
        sides = window if own is None else own
        if sides is None:
            plans[index] = OperatorPlan()
            continue
        rule = SlidingWindow(sides)
        wide = any(side < 0 or side >= WIDE_BLOCK[0] for side in (sides if isinstance(sides, tuple) else (sides,)))
        plans[index] = _window_plan(rule, decoder.facts.q_heads, WIDE_BLOCK if wide else BLOCK, causal=False)
    return plans


def _window_plan(window: SlidingWindow, q_heads: int, block: tuple[int, int], *, causal: bool) -> OperatorPlan:
    program = _program(window, block, causal=causal)
    numbers = (*block, 1, q_heads, *range(q_heads), *_listed(program), 0)
    return OperatorPlan(numbers, always=True, rule=repr(window))


def _plan(plan: LayerPlan, border: int) -> OperatorPlan:
    numbers: list[int] = [*plan.block_size, len(plan.groups)]
    for group in plan.groups:
        pattern, selector = parts(group.rule)
        program = [] if pattern is None else _program(pattern, plan.block_size)
        numbers += [len(group.heads), *group.heads, *_listed(program), int(selector is not None)]
        numbers += [] if selector is None else _choice(selector)
    rule = "; ".join(f"heads {','.join(map(str, group.heads))}: {group.rule!r}" for group in plan.groups)
    return OperatorPlan(tuple(numbers), border, False, rule)


def _program(pattern: Pattern, block_size: tuple[int, int], *, causal: bool = True) -> list[int]:
    """Encode a pattern for every length. Raise ValueError if more than its last queries depends on the request."""
    found = []
    for seqlen in (LONG, LONG // 2):
        grid = BlockGrid(seqlen, seqlen, block_size, causal)
        program = None if pattern.needs_tokens else pattern.within_causality(grid).program(grid)
        found.append(None if program is None else _from_the_end(program, seqlen))
    if found[0] is None or found[0] != found[1]:
        raise ValueError(f"{pattern!r} depends on the request: use windows, sinks, strides or global tokens")
    return found[0]


def _from_the_end(program: list[int], seqlen: int) -> list[int]:
    """Write first queries in the second half of a prompt as distances from its end, -n for the n-th of the last."""
    made, at = list(program), 0
    while at < len(program):
        count = operands(program[at], program[at + 1])
        if program[at] == Op.QUERIES:
            for first in range(at + 2, at + 1 + count, 2):
                made[first] -= seqlen if program[first] > seqlen // 2 else 0
        at += 1 + count
    return made


def _choice(selector: Selector) -> list[int]:
    kind = SCORERS.get(type(selector.scorer))
    if not isinstance(selector, TopK) or kind is None:
        raise ValueError(
            f"{selector!r} is not supported by the operator, which has TopK with MeanQuery, MeanPool or MinMax: run "
            "this policy with dynaxx.apply, or tune a policy with these scorers"
        )
    scorer = selector.scorer
    if getattr(scorer, "pool", None) is not None:
        raise ValueError(f"{scorer!r} must pool whole blocks")
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
