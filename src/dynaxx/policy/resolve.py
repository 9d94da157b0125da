# SPDX-License-Identifier: Apache-2.0
"""Turn a policy into plans: which heads of a layer follow which rule, in as few selection calls as possible.

Heads whose rules differ only in their budget share one rule with a budget per head. Static heads join such a rule with
a budget of 0.0 and dense heads with 1.0, which is exact. A layer of windows, hybrids and dense heads is therefore one
selection and one attention call. With `per="group"`, the heads of a kv head that share a rule choose together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynaxx.arguments import typed
from dynaxx.errors import PolicyError
from dynaxx.layout import as_block_size
from dynaxx.patterns import Causal, Full, Pattern
from dynaxx.policy.plan import HeadGroup, LayerPlan
from dynaxx.policy.rule import Phase, as_page_size, head_values
from dynaxx.policy.schema import Policy
from dynaxx.policy.specs import AttentionRule, budget_of, parts, rule_of, with_budget
from dynaxx.selection import Selector
from dynaxx.selection.pages import PageBudget


@typed
def resolve(policy: Policy) -> dict[int, LayerPlan]:
    """Return a plan for every layer with at least one sparse head."""
    facts, rules = policy.model, head_rules(policy)
    block_size: dict[int, tuple[int, int]] = {}
    for rule in policy.rules:
        for layer in rule.layer_list(facts.layers) if rule.phase == "prefill" else ():
            block_size[layer] = as_block_size(policy.block_size if rule.block_size is None else rule.block_size)
    return {
        layer: plan_of([rules[layer].get(head) for head in range(facts.q_heads)], facts.kv_heads, block_size[layer])
        for layer in sorted(rules)
        if any(rule is not None for rule in rules[layer].values())
    }


def head_rules(policy: Policy, phase: Phase = "prefill") -> dict[int, dict[int, AttentionRule | None]]:
    """Return the rule of each covered head by layer and head, each with a single budget. None means dense."""
    facts = policy.model
    rules: dict[int, dict[int, AttentionRule | None]] = {}
    for rule in policy.rules:
        if rule.phase != phase:
            continue
        heads = rule.head_list(facts.q_heads)
        built = per_head(rule.attention.build(), len(heads), head_values(rule.attention) is not None)
        for layer in rule.layer_list(facts.layers):
            rules.setdefault(layer, {}).update(zip(heads, built, strict=True))
    return rules


def plan_of(
    rules: Sequence[AttentionRule | None], kv_heads: int, block_size: tuple[int, int], *, causal: bool = True
) -> LayerPlan:
    """Return the plan of a layer whose q heads follow these rules, each with a single budget. None means dense."""
    return LayerPlan(_grouped(rules, Causal() if causal else Full()), len(rules), kv_heads, block_size, causal)


def per_head(rule: AttentionRule | None, count: int, has_values: bool) -> Sequence[AttentionRule | None]:
    """Return one rule per head, each with a single budget."""
    if not has_values:
        return [rule] * count
    pattern, selector = parts(rule)
    assert selector is not None, "a rule with budgets must have a selector"
    return [rule_of(pattern, with_budget(selector, value)) for value in budget_of(selector)]


def _grouped(rules: Sequence[AttentionRule | None], dense_rule: Pattern) -> tuple[HeadGroup, ...]:
    """Group heads by rule, ignoring budgets. Static and dense heads join a group with a selector if one fits."""
    by_key: dict[Any, list[int]] = {}
    for head, rule in enumerate(rules):
        pattern, selector = parts(rule)
        key = (pattern, None if selector is None else with_budget(selector, selector.nothing), rule is None)
        by_key.setdefault(key, []).append(head)
    selecting = [key for key in by_key if key[1] is not None]
    for pattern, family, dense in [key for key in by_key if key[1] is None]:
        hosts = [host for host in selecting if dense or host[0] == pattern]
        if hosts:
            by_key[hosts[0]] += by_key.pop((pattern, family, dense))
    groups = []
    for (pattern, family, _), members in by_key.items():
        heads = tuple(sorted(members))
        if family is None:
            groups.append(HeadGroup(heads, pattern if pattern is not None else dense_rule))
            continue
        budgets = tuple(_head_budget(rules[head], family) for head in heads)
        same = budgets[0] if len(set(map(repr, budgets))) == 1 else budgets
        groups.append(HeadGroup(heads, rule_of(pattern, with_budget(family, same))))
    return tuple(sorted(groups, key=lambda group: group.heads))


def _head_budget(rule: AttentionRule | None, family: Selector) -> float:
    """Return the budget of a head in a shared rule: everything for a dense head, nothing for a static one."""
    if rule is None:
        return family.everything
    _, selector = parts(rule)
    return family.nothing if selector is None else budget_of(selector)


@dataclass(frozen=True)
class DecodePlan:
    """The decode rule of one layer."""

    budget: PageBudget
    page_size: int

    def shard(self, rank: int, ranks: int) -> DecodePlan:
        """Return the plan for one of `ranks` equal shares of the heads, split as in `LayerPlan.shard`.

        If ranks share a kv head, each rank chooses its pages by its own q heads.
        """
        if not isinstance(self.budget.budget, tuple):
            return self
        kv_heads = len(self.budget.budget)
        first = rank * kv_heads // ranks
        own = self.budget.budget[first : first + max(1, kv_heads // ranks)]
        return replace(self, budget=replace(self.budget, budget=own))


def resolve_decode(policy: Policy) -> dict[int, DecodePlan]:
    """Return a plan for every layer that a decode rule covers.

    The q heads of a kv head read the same pages, with the widest of their sinks and windows and the largest of their
    budgets. If no rule covers a q head, its kv head is dense.

    Raises:
        PolicyError: heads of a layer score pages in different ways, or count them in different units.
    """
    facts, plans = policy.model, {}
    group = facts.q_heads // facts.kv_heads
    for layer, heads in sorted(head_rules(policy, "decode").items()):
        rules = [heads.get(head) for head in range(facts.q_heads)]
        budgets = [PageBudget(1.0) if rule is None else PageBudget.of(rule) for rule in rules]
        choosing = [each for each in budgets if each.budget not in (0, 1.0)]
        bounds = {each.bound for each in choosing}
        if len(bounds) > 1:
            raise PolicyError(f"decode rules of layer {layer} must score pages in one way, got bounds {sorted(bounds)}")
        by_kv_head = [budgets[start : start + group] for start in range(0, facts.q_heads, group)]
        amounts = tuple(_largest(layer, members) for members in by_kv_head)
        plans[layer] = DecodePlan(
            PageBudget(
                amounts[0] if len(set(map(repr, amounts))) == 1 else amounts,
                sinks=max(each.sinks for each in budgets),
                window=max(each.window for each in budgets),
                bound=bounds.pop() if bounds else 1.0,
            ),
            _page_size(policy, layer),
        )
    return plans


def _largest(layer: int, budgets: list[PageBudget]) -> int | float:
    """Return the largest budget of the q heads that share one kv head."""
    amounts = [amount for each in budgets for amount in each.budgets if amount != 0]
    if any(isinstance(amount, float) and amount == 1 for amount in amounts):
        return 1.0
    if len({type(amount) for amount in amounts}) > 1:
        raise PolicyError(
            f"decode rules of layer {layer} must give the heads of one kv head shares or counts of pages, got {amounts}"
        )
    return max(amounts, default=0)


def _page_size(policy: Policy, layer: int) -> int:
    sizes = [
        as_page_size(policy.block_size if rule.block_size is None else rule.block_size)
        for rule in policy.rules
        if rule.phase == "decode" and layer in rule.layer_list(policy.model.layers)
    ]
    return sizes[0]
