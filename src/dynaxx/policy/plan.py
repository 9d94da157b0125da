# SPDX-License-Identifier: Apache-2.0
"""`LayerPlan`: the rules that the heads of one layer follow over whole sequences, and their layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.layout import BlockLayout
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.paging import SequenceKeys
from dynaxx.lazy import lazy
from dynaxx.patterns import Dilated, Pattern, SlidingWindow
from dynaxx.patterns.base import Intersection, Union
from dynaxx.policy.specs import AttentionRule, budget_of, for_heads, parts, rule_of, with_budget
from dynaxx.selection import Hybrid, Selector, Threshold, TopK, TopP, select_blocks
from dynaxx.selection.device import select_in_place, serves_in_place


@dataclass(frozen=True)
class HeadGroup:
    """Q heads in ascending order and the rule that they follow. Budgets per head have the same order."""

    heads: tuple[int, ...]
    rule: AttentionRule


@dataclass(frozen=True)
class LayerPlan:
    """The rules of one layer. The groups cover every q head once."""

    groups: tuple[HeadGroup, ...]
    q_heads: int
    kv_heads: int
    block_size: tuple[int, int]
    causal: bool = True

    def __post_init__(self) -> None:
        """Check the heads of the groups."""
        heads = sorted(head for group in self.groups for head in group.heads)
        if heads != list(range(self.q_heads)):
            raise ValueError(f"`groups` must hold each of {self.q_heads} q heads once, got {heads}")

    @lazy
    def is_static(self) -> bool:
        """Return whether visibility depends on positions only, so that layouts can be cached."""
        return all(isinstance(group.rule, Pattern) for group in self.groups)

    def lead(self, seqlen_q: int, seqlen_k: int) -> int:
        """Return how many queries to put in front of a chunk, so that its blocks start where the whole prompt's do.

        0 for rules that do not depend on it, and for rules over data, which choose anew for each chunk.
        """
        return (seqlen_k - seqlen_q) % self.block_size[0] if self._by_blocks else 0

    @lazy
    def _by_blocks(self) -> bool:
        return self.is_static and any(isinstance(g.rule, Pattern) and g.rule.by_blocks for g in self.groups)

    @lazy
    def needs_tokens(self) -> bool:
        """Return whether a rule depends on token ids, so that `resolve` must be called first."""
        return any(group.rule.needs_tokens for group in self.groups if isinstance(group.rule, Pattern | Hybrid))

    def resolve(self, input_ids: Tensor) -> LayerPlan:
        """Return this plan for one sequence of (seqlen_k,) token ids; see `Pattern.resolve`."""
        if not self.needs_tokens:
            return self
        groups = (
            replace(group, rule=group.rule.resolve(input_ids)) if isinstance(group.rule, Pattern | Hybrid) else group
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def shard(self, rank: int, ranks: int) -> LayerPlan:
        """Return the plan for one of `ranks` equal shares of the q heads, split in order as in tensor parallelism.

        Raises:
            ValueError: the heads do not divide evenly.
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
                groups.append(HeadGroup(heads, for_heads(group.rule, own)))
        return LayerPlan(tuple(groups), q_heads, max(1, self.kv_heads // ranks), self.block_size, self.causal)

    @torch.inference_mode(False)
    @torch.no_grad()
    def layout(self, q: Tensor, k: Tensor, *, scale: float | None = None) -> BlockLayout:
        """Return the layout of this layer for these queries and keys, exact for every head.

        Args:
            q: (batch, seqlen_q, q_heads, head_dim), aligned to the last keys.
            k: (batch, seqlen_k, kv_heads, head_dim).
            scale: softmax scale, default head_dim ** -0.5.
        """
        # Outside inference mode, because a backward pass may use the cached layout later.
        if self.is_static:
            return _static_layout(self, q.shape[1], k.shape[1], q.device)
        first = self.groups[0]
        if len(self.groups) == 1:
            return select_blocks(q, k, first.rule, causal=self.causal, block_size=self.block_size, scale=scale)
        layouts = []
        for group in self.groups:
            part = select_blocks(
                q[:, :, list(group.heads)],
                _keys_of(k, group.heads, self.q_heads),
                group.rule,
                causal=self.causal,
                block_size=self.block_size,
                scale=scale,
            )
            layouts.append(_repeat(part, q.shape[0], len(group.heads)))
        return _side_by_side(layouts, self.groups)

    @torch.inference_mode(False)
    @torch.no_grad()
    def layout_in_place(self, q: Tensor, keys: SequenceKeys, *, scale: float | None = None) -> BlockLayout | None:
        """Return `layout` of queries over keys in the pages of a cache; None if a rule needs the keys in order.

        Args:
            q: (1, seqlen_q, q_heads, head_dim), aligned to the last keys.
            keys: the keys of the sequence.
            scale: softmax scale, default head_dim ** -0.5.
        """
        if self.is_static:
            return _static_layout(self, q.shape[1], keys.seqlen_k, q.device)
        rule = self.groups[0].rule
        if len(self.groups) > 1 or isinstance(rule, Pattern):
            return None
        pattern, selector = (rule.pattern, rule.selector) if isinstance(rule, Hybrid) else (None, rule)
        if not serves_in_place(q, keys, selector, self.block_size):
            return None
        return select_in_place(q, keys, pattern, selector, self.block_size, scale)


@LayoutCache
def _static_layout(plan: LayerPlan, seqlen_q: int, seqlen_k: int, device: torch.device) -> BlockLayout:
    made = [
        group.rule.layout(seqlen_q, seqlen_k, causal=plan.causal, block_size=plan.block_size, device=device)
        for group in plan.groups
        if isinstance(group.rule, Pattern)
    ]
    if len(made) == 1:
        return made[0]
    parts = [_repeat(layout, 1, len(group.heads)) for layout, group in zip(made, plan.groups, strict=True)]
    return _side_by_side(parts, plan.groups)


def _keys_of(k: Tensor, heads: tuple[int, ...], q_heads: int) -> Tensor:
    """Return the kv heads that `heads` read: each once if the q heads share them evenly, else one per q head."""
    group_size = q_heads // k.shape[2]
    of_head = [head // group_size for head in heads]
    used = sorted(set(of_head))
    evenly = all(of_head.count(kv_head) * len(used) == len(heads) for kv_head in used)
    return k[:, :, used if evenly else of_head]


def _repeat(layout: BlockLayout, batch: int, heads: int) -> BlockLayout:
    """Return a shared layout repeated for every batch entry and head. Other layouts are returned unchanged."""
    copies = (batch // layout.layout_batch) * (heads // layout.layout_heads)
    if copies == 1:
        return layout
    flat_rows, cols, mask_ids = layout.entries()
    shift = torch.arange(copies, device=layout.device)[:, None] * layout.q_blocks
    return BlockLayout.from_entries(
        layout.grid(),
        (flat_rows + shift).flatten(),
        cols.repeat(copies),
        mask_ids.repeat(copies),
        layout.masks,
        layout_batch=batch,
        layout_heads=heads,
    )


def _side_by_side(layouts: Iterable[BlockLayout], groups: Sequence[HeadGroup]) -> BlockLayout:
    """Return one layout with its heads in ascending order."""
    order = [head for group in groups for head in group.heads]
    stacked = BlockLayout.stack_heads(list(layouts))
    return stacked.head_slice(sorted(range(len(order)), key=order.__getitem__))


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
