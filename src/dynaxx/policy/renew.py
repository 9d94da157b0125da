# SPDX-License-Identifier: Apache-2.0
"""Renew a policy from recorded statistics: each head gets the budget that restores its recall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dynaxx.errors import PolicyError
from dynaxx.policy.facts import Evidence
from dynaxx.policy.files import rules_digest
from dynaxx.policy.plan import scaled
from dynaxx.policy.profile import LADDER, LayerProfile, Profile, midpoints
from dynaxx.policy.rule import Rule
from dynaxx.policy.schema import Policy
from dynaxx.policy.specs import AttentionRule, budget_of, parts, rule_of, with_budget
from dynaxx.selection import Selector, TopK, TopP

ENOUGH = 0.01  # recall may miss its goal by this much before a budget changes
MIN_CALLS = 4  # a layer with fewer calls measured at other budgets keeps its budgets
DIGITS = 3  # digits of a new share


class HeadRenewal(NamedTuple):
    """The change of one head's budget."""

    layer: int
    head: int
    recall: float  # recorded recall
    goal: float
    factor: float  # factor on the budget; inf means dense


def renew(
    policy: Policy, recorded: Profile, *, recall: float | None = None, command: str = ""
) -> tuple[Policy, list[HeadRenewal]]:
    """Change budgets so that each head keeps its recall on the recorded traffic.

    A head's goal is its mean recall in the policy's reference, or `recall`. The head gets the smallest budget that
    reached the goal in the statistics, between a quarter and five times the old budget; a head that needs more becomes
    dense. Layers with few recorded calls keep their budgets. A layer whose budgets change loses its reference, so
    record a new one.

    Args:
        policy: the policy in force during the recording.
        recorded: statistics recorded under that policy, from `Handle.statistics` or a statistics file.
        recall: one goal for all heads.
        command: the command line, for the evidence.

    Raises:
        PolicyError: the statistics belong to other rules, or there is no goal.
    """
    if recorded.policy != rules_digest(policy):
        raise PolicyError(
            "the statistics were recorded under other rules than this policy's; give the policy that was in force then"
        )
    if recall is None and policy.reference is None:
        raise PolicyError(
            "`reference` is empty, so no head has a recall goal; record a reference with --record, or give --recall"
        )
    renewals: list[HeadRenewal] = []
    factors: dict[int, tuple[float, ...]] = {}
    for seen in recorded.layers:
        known = policy.reference.of_layer(seen.layer) if policy.reference else None
        if seen.ladder_calls < MIN_CALLS or (recall is None and known is None):
            continue
        goals = [recall] * len(seen.ladder) if recall is not None else mean_recall(known)
        row = [_factor(*each) for each in zip(seen.ladder, goals, strict=True)]
        if any(factor != 1.0 for factor in row):
            factors[seen.layer] = tuple(row)
            at = LADDER.index(1.0)
            renewals += [
                HeadRenewal(seen.layer, head, seen.ladder[head][at], goals[head], factor)
                for head, factor in enumerate(row)
                if factor != 1.0
            ]
    if not factors:
        return policy, []
    rules = [new for rule in policy.rules for new in _renewed(rule, policy, factors)]
    kept = tuple(each for each in policy.reference.layers if each.layer not in factors) if policy.reference else ()
    evidence = Evidence(
        what="budgets renewed from recorded statistics",
        command=command,
        values={"heads_changed": len(renewals), "calls": min(each.calls for each in recorded.layers)},
    )
    reference = policy.reference.model_copy(update={"layers": kept}) if policy.reference and kept else None
    changes: dict[str, Any] = {
        "rules": _merged(rules),
        "reference": reference,
        "evidence": (*policy.evidence, evidence),
    }
    return policy.replace(**changes), renewals


def mean_recall(profile: LayerProfile | None) -> list[float]:
    """Return the mean recall of each head: exact from the ladder if there is one, else from the histogram."""
    assert profile is not None, "the caller must have found a profile"
    if profile.ladder:
        return [row[LADDER.index(1.0)] for row in profile.ladder]
    counts = torch.tensor(profile.recall, dtype=torch.float64, device="cpu")
    mean: list[float] = ((counts * midpoints()).sum(-1) / counts.sum(-1).clamp(min=1)).tolist()
    return mean


def _factor(ladder: Sequence[float], goal: float) -> float:
    """Return the smallest factor that reaches a recall, interpolated linearly between steps of the ladder."""
    if abs(ladder[LADDER.index(1.0)] - goal) <= ENOUGH:
        return 1.0
    goal -= ENOUGH / 2
    for index, (factor, recall) in enumerate(zip(LADDER, ladder, strict=True)):
        if recall >= goal:
            if index == 0:
                return factor
            low, before = LADDER[index - 1], ladder[index - 1]
            return round(low + (factor - low) * (goal - before) / max(1e-9, recall - before), DIGITS)
    return math.inf


def _renewed(rule: Rule, policy: Policy, factors: dict[int, tuple[float, ...]]) -> list[Rule]:
    """Return one rule for each layer that a prefill rule covers. Decode rules are returned unchanged."""
    if rule.phase == "decode":
        return [rule]
    heads, attention = rule.head_list(policy.model.q_heads), rule.attention.build()
    made = []
    for layer in rule.layer_list(policy.model.layers):
        row = factors.get(layer)
        new = attention if row is None or attention is None else _scaled(attention, tuple(row[head] for head in heads))
        made.append(Rule.of(new, layers=[layer], heads=rule.heads, block_size=rule.block_size))
    return made


def _scaled(rule: AttentionRule, factors: tuple[float, ...]) -> AttentionRule | None:
    pattern, selector = parts(rule)
    if selector is None:  # a pattern has one window for all heads of a rule
        most = max(factors)
        return None if most == math.inf else scaled(rule, most) if most != 1.0 else rule
    finite = scaled(selector, tuple(1.0 if factor == math.inf else factor for factor in factors))
    assert isinstance(finite, Selector), "`scaled` must keep the selector"
    budgets = budget_of(finite)
    everything = 10**6 if isinstance(selector, TopK) and isinstance(budgets[0], int) else selector.everything
    new = tuple(
        everything if factor == math.inf else round(budget, DIGITS) if isinstance(selector, TopK | TopP) else budget
        for budget, factor in zip(budgets, factors, strict=True)
    )
    return rule_of(pattern, with_budget(selector, new[0] if len(set(new)) == 1 else new))


def _merged(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Merge rules that differ only in their layers."""
    layers: dict[Rule, list[int]] = {}
    for rule in rules:
        alike = layers.setdefault(rule.model_copy(update={"layers": "all"}), [])
        alike += () if rule.layers == "all" else rule.layers
    return tuple(rule.model_copy(update={"layers": tuple(found) or "all"}) for rule, found in layers.items())
