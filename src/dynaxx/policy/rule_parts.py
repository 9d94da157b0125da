"""The parts of a rule: its pattern, its selector, and that one's budget, which heads may have each their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynaxx.patterns import Pattern
from dynaxx.policy.specs import AttentionRule
from dynaxx.selection import Hybrid, Selector


def parts(rule: AttentionRule | None) -> tuple[Pattern | None, Selector | None]:
    """Pattern and selector, None for what it does not have."""
    if isinstance(rule, Hybrid):
        return rule.pattern, rule.selector
    if isinstance(rule, Selector):
        return None, rule
    return rule, None


def rule_of(pattern: Pattern | None, selector: Selector) -> AttentionRule:
    """The rule of these parts."""
    return selector if pattern is None else Hybrid(pattern, selector)


def budget_of(selector: Selector) -> Any:
    """A number, or one per head."""
    return getattr(selector, selector.budget_field)


def with_budget(selector: Selector, value: Any) -> Selector:
    """The same selector with another budget."""
    return replace(selector, **{selector.budget_field: value})  # type: ignore[type-var]  # every selector is a dataclass


def for_heads(rule: AttentionRule, which: Sequence[int]) -> AttentionRule:
    """The rule for some of the heads it was made for, by their places."""
    pattern, selector = parts(rule)
    if selector is None or not isinstance(budget_of(selector), tuple):
        return rule
    budgets = tuple(budget_of(selector)[at] for at in which)
    return rule_of(pattern, with_budget(selector, budgets))
