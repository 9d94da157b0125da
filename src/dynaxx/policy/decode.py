# SPDX-License-Identifier: Apache-2.0
"""Turn a policy's decode rules into one page budget per layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaxx.errors import PolicyError
from dynaxx.policy.resolve import head_rules
from dynaxx.policy.rule import as_page_size
from dynaxx.policy.schema import Policy
from dynaxx.selection.pages import PageBudget


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
