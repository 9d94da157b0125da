# SPDX-License-Identifier: Apache-2.0
"""Split rules into pattern, selector and budget, and combine them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynaxx.patterns import Pattern
from dynaxx.policy.specs import AttentionRule
from dynaxx.selection import Hybrid, Selector


def parts(rule: AttentionRule | None) -> tuple[Pattern | None, Selector | None]:
    """Return the pattern and the selector of a rule, None for a missing part."""
    if isinstance(rule, Hybrid):
        return rule.pattern, rule.selector
    if isinstance(rule, Selector):
        return None, rule
    return rule, None


def rule_of(pattern: Pattern | None, selector: Selector) -> AttentionRule:
    """Return the rule of a pattern and a selector."""
    return selector if pattern is None else Hybrid(pattern, selector)


def budget_of(selector: Selector) -> Any:
    """Return a selector's budget: one number, or a tuple with one per head."""
    return getattr(selector, selector.budget_field)


def with_budget(selector: Selector, value: Any) -> Selector:
    """Return the same selector with another budget."""
    return replace(selector, **{selector.budget_field: value})  # type: ignore[type-var]  # every selector is a dataclass


def for_heads(rule: AttentionRule, which: Sequence[int]) -> AttentionRule:
    """Return the rule for a subset of its heads, given by their indices."""
    pattern, selector = parts(rule)
    if selector is None or not isinstance(budget_of(selector), tuple):
        return rule
    budgets = tuple(budget_of(selector)[at] for at in which)
    return rule_of(pattern, with_budget(selector, budgets))
