"""From a policy to plans: per layer, which heads follow which rule, in as few selection calls as can be.

Heads whose rules differ only in their budget share one rule with a budget per head. A static head joins such a rule
with a budget of 0.0 and a dense head with 1.0, which mean exactly that; so a layer of windows, hybrids and dense heads
is one selection and one attention call. Where heads choose together (`per="group"`), those of a kv head that share a
rule do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import BlockLayout, as_block_size
from dynaxx.patterns import Causal, Pattern
from dynaxx.policy.schema import Phase, Policy, head_values
from dynaxx.policy.specs import AttentionRule
from dynaxx.selection import Hybrid, Selector, select_blocks


@dataclass(frozen=True)
class HeadGroup:
    """Some q heads, ascending, and the rule they follow; its budgets, where per head, are in that order."""

    heads: tuple[int, ...]
    rule: AttentionRule


@dataclass(frozen=True)
class LayerPlan:
    """What the heads of one layer do in prefill; the groups cover every q head once."""

    groups: tuple[HeadGroup, ...]
    q_heads: int
    kv_heads: int
    block_size: tuple[int, int]

    @cached_property
    def is_static(self) -> bool:
        """Whether positions alone decide, so that layouts are cached."""
        return all(isinstance(group.rule, Pattern) for group in self.groups)

    @cached_property
    def needs_tokens(self) -> bool:
        """Whether some rule looks at content, so that a request's tokens must resolve it first."""
        return any(group.rule.needs_tokens for group in self.groups if isinstance(group.rule, Pattern | Hybrid))

    def resolve(self, input_ids: Tensor) -> LayerPlan:
        """This plan for one sequence of (seqlen_k,) token ids; see `Pattern.resolve`."""
        if not self.needs_tokens:
            return self
        groups = (
            replace(group, rule=group.rule.resolve(input_ids)) if isinstance(group.rule, Pattern | Hybrid) else group
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def shard(self, rank: int, ranks: int) -> LayerPlan:
        """The plan of one of `ranks` equal shares of the q heads, in order, as tensor parallelism cuts them.

        Raises:
            ValueError: heads that do not divide.
        """
        if ranks == 1:
            return self
        if self.q_heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise ValueError(f"{self.q_heads} q heads and {self.kv_heads} kv heads must divide among {ranks} ranks")
        q_heads = self.q_heads // ranks
        first, groups = rank * q_heads, []
        for group in self.groups:
            own = [at for at, head in enumerate(group.heads) if first <= head < first + q_heads]
            if own:
                heads = tuple(group.heads[at] - first for at in own)
                groups.append(HeadGroup(heads, _some_heads(group.rule, own)))
        return LayerPlan(tuple(groups), q_heads, max(1, self.kv_heads // ranks), self.block_size)

    @torch.inference_mode(False)
    @torch.no_grad()
    def layout(self, q: Tensor, k: Tensor, *, scale: float | None = None) -> BlockLayout:
        """The causal layout of this layer for these queries and keys, exact for every head.

        Args:
            q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys.
            k: (batch, seqlen_k, kv_heads, head_dim).
            scale: softmax scale, default head_dim ** -0.5.
        """
        # Outside inference mode: what is cached now may be saved for a backward pass later.
        if self.is_static:
            return _static_layout(self, q.shape[1], k.shape[1], q.device)
        first = self.groups[0]
        if len(self.groups) == 1:
            return select_blocks(q, k, first.rule, block_size=self.block_size, scale=scale)
        layouts = []
        for group in self.groups:
            part = select_blocks(
                q[:, :, list(group.heads)],
                _keys_of(k, group.heads, self.q_heads),
                group.rule,
                block_size=self.block_size,
                scale=scale,
            )
            layouts.append(_repeat(part, q.shape[0], len(group.heads)))
        return _side_by_side(layouts, self.groups)


@typed
class LengthSwitch:
    """Dense or sparse by length, with hysteresis; see `Policy`.

    Attributes:
        last: the last answer, False at first.
    """

    __slots__ = ("dense_below", "last", "sparse_from")

    def __init__(self, dense_below: int, sparse_from: int | None = None) -> None:
        self.dense_below = dense_below
        self.sparse_from = dense_below if sparse_from is None else sparse_from
        self.last = False

    def sparse(self, seqlen_k: int) -> bool:
        """Whether a sequence of so many keys runs sparse."""
        if seqlen_k >= self.sparse_from:
            self.last = True
        elif seqlen_k < self.dense_below:
            self.last = False
        return self.last

    def reset(self) -> None:
        """Forget the last answer."""
        self.last = False


@typed
def resolve(policy: Policy) -> dict[int, LayerPlan]:
    """A plan for every layer in which some head is sparse."""
    facts, rules = policy.model, head_rules(policy)
    block_size: dict[int, tuple[int, int]] = {}
    for rule in policy.rules:
        for layer in rule.layer_list(facts.layers) if rule.phase == "prefill" else ():
            block_size[layer] = as_block_size(policy.block_size if rule.block_size is None else rule.block_size)
    return {
        layer: LayerPlan(
            _grouped([rules[layer].get(head) for head in range(facts.q_heads)]),
            facts.q_heads,
            facts.kv_heads,
            block_size[layer],
        )
        for layer in sorted(rules)
        if any(rule is not None for rule in rules[layer].values())
    }


def selection_sources(plans: dict[int, LayerPlan], reuse: int) -> dict[int, int]:
    """By layer, whose selection it uses: of each `reuse` layers in a row with the same plan, the first one's."""
    sources: dict[int, int] = {}
    first, served = -1, 0
    for layer, plan in plans.items() if reuse > 1 else ():
        if plan.is_static:
            continue
        if first < 0 or served == reuse or plan != plans[first]:
            first, served = layer, 0
        sources[layer], served = first, served + 1
    return sources


def head_rules(policy: Policy, phase: Phase = "prefill") -> dict[int, dict[int, AttentionRule | None]]:
    """By layer and head, what each covered head does by itself; None is dense."""
    facts = policy.model
    rules: dict[int, dict[int, AttentionRule | None]] = {}
    for rule in policy.rules:
        if rule.phase != phase:
            continue
        heads = rule.head_list(facts.q_heads)
        built = _per_head(rule.attention.build(), len(heads), head_values(rule.attention) is not None)
        for layer in rule.layer_list(facts.layers):
            rules.setdefault(layer, {}).update(zip(heads, built, strict=True))
    return rules


def _per_head(rule: AttentionRule | None, count: int, has_values: bool) -> Sequence[AttentionRule | None]:
    """One rule per head, each with a single budget."""
    if not has_values:
        return [rule] * count
    pattern, selector = _parts(rule)
    assert selector is not None, "only selectors have budgets"
    return [_rule(pattern, _with_budget(selector, value)) for value in _budget(selector)]


def _grouped(rules: list[AttentionRule | None]) -> tuple[HeadGroup, ...]:
    """Heads by what they follow, budgets aside; static and dense heads join a selecting group where one fits."""
    by_key: dict[Any, list[int]] = {}
    for head, rule in enumerate(rules):
        pattern, selector = _parts(rule)
        key = (pattern, None if selector is None else _with_budget(selector, 0.0), rule is None)
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
            groups.append(HeadGroup(heads, pattern if pattern is not None else Causal()))
            continue
        budgets = tuple(_head_budget(rules[head], family) for head in heads)
        same = budgets[0] if len(set(map(repr, budgets))) == 1 else budgets
        groups.append(HeadGroup(heads, _rule(pattern, _with_budget(family, same))))
    return tuple(sorted(groups, key=lambda group: group.heads))


def _parts(rule: AttentionRule | None) -> tuple[Pattern | None, Selector | None]:
    if isinstance(rule, Hybrid):
        return rule.pattern, rule.selector
    if isinstance(rule, Selector):
        return None, rule
    return rule, None


def _rule(pattern: Pattern | None, selector: Selector) -> AttentionRule:
    return selector if pattern is None else Hybrid(pattern, selector)


def _budget(selector: Selector) -> Any:
    return getattr(selector, selector.budget_field)


def _with_budget(selector: Selector, value: Any) -> Selector:
    return replace(selector, **{selector.budget_field: value})  # type: ignore[type-var]  # every selector is a dataclass


def _some_heads(rule: AttentionRule, which: Sequence[int]) -> AttentionRule:
    """The rule for some of the heads it was made for, by their places."""
    pattern, selector = _parts(rule)
    if selector is None or not isinstance(_budget(selector), tuple):
        return rule
    budgets = tuple(_budget(selector)[at] for at in which)
    return _rule(pattern, _with_budget(selector, budgets))


def _head_budget(rule: AttentionRule | None, family: Selector) -> float:
    """A head's budget in a shared rule: everything for a dense one, nothing beside the pattern for a static one."""
    if rule is None:
        return family.everything
    _, selector = _parts(rule)
    return family.nothing if selector is None else _budget(selector)


@lru_cache(maxsize=256)
def _static_layout(plan: LayerPlan, seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockLayout:
    made = [
        group.rule.layout(seqlen_q, seqlen_k, block_size=plan.block_size, device=device)
        for group in plan.groups
        if isinstance(group.rule, Pattern)
    ]
    if len(made) == 1:
        return made[0]
    parts = [_repeat(layout, 1, len(group.heads)) for layout, group in zip(made, plan.groups, strict=True)]
    return _side_by_side(parts, plan.groups)


def _keys_of(k: Tensor, heads: tuple[int, ...], q_heads: int) -> Tensor:
    """The kv heads that `heads` read, each once where they share evenly, else one per q head."""
    group_size = q_heads // k.shape[2]
    of_head = [head // group_size for head in heads]
    used = sorted(set(of_head))
    evenly = all(of_head.count(kv_head) * len(used) == len(heads) for kv_head in used)
    return k[:, :, used if evenly else of_head]


def _repeat(layout: BlockLayout, batch: int, heads: int) -> BlockLayout:
    """A shared layout written out for every batch entry and head; any other one as it is."""
    copies = (batch // layout.layout_batch) * (heads // layout.layout_heads)
    if copies == 1:
        return layout
    lead, cols, codes = layout.entries()
    shift = torch.arange(copies, device=layout.device)[:, None] * layout.q_blocks
    return BlockLayout.from_entries(
        layout.grid(),
        (lead + shift).flatten(),
        cols.repeat(copies),
        codes.repeat(copies),
        layout.masks,
        layout_batch=batch,
        layout_heads=heads,
    )


def _side_by_side(layouts: Iterable[BlockLayout], groups: Sequence[HeadGroup]) -> BlockLayout:
    """One layout in the order of the heads."""
    order = [head for group in groups for head in group.heads]
    stacked = BlockLayout.stack_heads(list(layouts))
    return stacked.head_slice(sorted(range(len(order)), key=order.__getitem__))
