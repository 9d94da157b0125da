# SPDX-License-Identifier: Apache-2.0
"""Scale a rule: multiply its budgets, or its windows if it has no budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dynaxx.patterns import Dilated, Pattern, SlidingWindow
from dynaxx.patterns.base import Intersection, Union
from dynaxx.policy.plan import HeadGroup, LayerPlan
from dynaxx.policy.rule_parts import budget_of, parts, rule_of, with_budget
from dynaxx.policy.specs import AttentionRule
from dynaxx.selection import Selector, Threshold, TopK, TopP


def scaled_plan(plan: LayerPlan, factor: float) -> LayerPlan:
    """Return a plan whose heads see about `factor` times as many keys."""
    return replace(plan, groups=tuple(HeadGroup(group.heads, scaled(group.rule, factor)) for group in plan.groups))


def scaled(rule: AttentionRule, factor: float | tuple[float, ...]) -> AttentionRule:
    """Return a rule that shows about `factor` times as many keys. Give one factor, or one per head of a selector.

    Shares and counts of blocks are multiplied by the factor. A mass m becomes 1 - (1 - m) / factor, and a threshold is
    divided. A pattern without a selector has its windows multiplied. Full and empty budgets do not change.

    Raises:
        ValueError: there are factors per head, but the rule has no selector.
    """
    pattern, selector = parts(rule)
    if selector is not None:
        return rule_of(pattern, _scaled_selector(selector, factor))
    if isinstance(factor, tuple):
        raise ValueError(f"{rule!r} has no budget per head; give one factor")
    assert pattern is not None, "a rule must have a pattern or a selector"
    return _scaled_pattern(pattern, factor)


def _scaled_selector(selector: Selector, factor: float | tuple[float, ...]) -> Selector:
    value = budget_of(selector)
    if isinstance(factor, tuple):
        values = value if isinstance(value, tuple) else (value,) * len(factor)
        new: Any = tuple(_scaled_budget(selector, *each) for each in zip(values, factor, strict=True))
    elif isinstance(value, tuple):
        new = tuple(_scaled_budget(selector, each, factor) for each in value)
    else:
        new = _scaled_budget(selector, value, factor)
    return with_budget(selector, new)


def _scaled_budget(selector: Selector, value: float, factor: float) -> float:
    if isinstance(selector, TopK) and isinstance(value, int):
        return math.ceil(value * factor)
    if isinstance(selector, TopK):
        return min(1.0, value * factor)
    if isinstance(selector, TopP):
        return max(0.0, 1 - (1 - value) / factor) if value else 0.0
    if isinstance(selector, Threshold):
        return value / factor
    return value


def _scaled_pattern(pattern: Pattern, factor: float) -> Pattern:
    if isinstance(pattern, Union | Intersection):
        return type(pattern)(tuple(_scaled_pattern(part, factor) for part in pattern.parts))
    if isinstance(pattern, SlidingWindow):
        window = pattern.window
        if isinstance(window, int):
            return SlidingWindow(math.ceil(window * factor))
        left, right = (side if side < 0 else math.ceil(side * factor) for side in window)
        return SlidingWindow((left, right))
    return Dilated(math.ceil(pattern.window * factor), pattern.dilation) if isinstance(pattern, Dilated) else pattern
