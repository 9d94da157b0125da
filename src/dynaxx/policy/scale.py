# SPDX-License-Identifier: Apache-2.0
"""Scale a rule: multiply its budgets, or its windows where it has no budget."""

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
    """Return a plan whose heads see about `factor` times as much."""
    return replace(plan, groups=tuple(HeadGroup(group.heads, scaled(group.rule, factor)) for group in plan.groups))


def scaled(rule: AttentionRule, factor: float | tuple[float, ...]) -> AttentionRule:
    """Return a rule that shows about `factor` times as much; one factor, or one per head of a selector.

    A selector's shares and counts of blocks are multiplied. Of a mass to reach, what may be missing is divided; so is a
    threshold. A pattern alone has its windows multiplied. What is full stays full, and what is nothing stays nothing.

    Raises:
        ValueError: factors per head for a rule without a selector.
    """
    pattern, selector = parts(rule)
    if selector is not None:
        return rule_of(pattern, _scaled_selector(selector, factor))
    if isinstance(factor, tuple):
        raise ValueError(f"{rule!r} has no budget per head; give one factor")
    assert pattern is not None, "a rule has a pattern or a selector"
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
