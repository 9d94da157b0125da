# SPDX-License-Identifier: Apache-2.0
"""Compare two policies: fields by name, rules by what each head does."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from dynaxx.policy.resolve import head_rules
from dynaxx.policy.rule import Phase
from dynaxx.policy.schema import Policy

SHOWN_FIELDS = (
    "model",
    "block_size",
    "dense_below",
    "sparse_from",
    "decode_dense_below",
    "rollout",
    "guard",
    "drift",
    "tolerances",
)
PHASES: tuple[Phase, ...] = ("prefill", "decode")
NOTED_FIELDS = ("measured_on", "evidence", "reference")  # reported as different, without their values


class HeadChange(NamedTuple):
    """One head whose rule changed."""

    phase: str
    layer: int
    head: int
    old: str
    new: str


class PolicyDiff(NamedTuple):
    """The differences between an old policy and a new one."""

    fields: tuple[tuple[str, Any, Any], ...]  # path, old, new
    heads: tuple[HeadChange, ...]
    noted: tuple[str, ...]  # those of `NOTED_FIELDS` that differ

    @property
    def same(self) -> bool:
        """Return whether the policies are equal."""
        return not (self.fields or self.heads or self.noted)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "same": self.same,
            "fields": [{"field": field, "old": old, "new": new} for field, old, new in self.fields],
            "heads": [change._asdict() for change in self.heads],
            "noted": list(self.noted),
        }

    def summary(self) -> str:
        """Return the changes as text, one line each. Heads of a layer with the same change share a line."""
        lines = [f"{field}: {old} -> {new}" for field, old, new in self.fields]
        alike = lambda change: (change.phase, change.layer, change.old, change.new)
        for (phase, layer, old, new), found in groupby(sorted(self.heads, key=alike), key=alike):
            heads = ",".join(str(change.head) for change in found)
            lines += [f"{phase}, layer {layer} heads {heads}:", f"  - {old}", f"  + {new}"]
        lines += [f"{field} differs" for field in self.noted]
        return "\n".join(lines) or "no difference"


def diff(old: Policy, new: Policy) -> PolicyDiff:
    """Compare two policies."""
    before, after = (policy.model_dump(mode="json", include=set(SHOWN_FIELDS)) for policy in (old, new))
    fields = tuple(_changes("", before, after))
    heads = [change for phase in PHASES for change in _head_changes(old, new, phase)]
    noted = tuple(name for name in NOTED_FIELDS if getattr(old, name) != getattr(new, name))
    return PolicyDiff(fields, tuple(heads), noted)


def _head_changes(old: Policy, new: Policy, phase: Phase) -> list[HeadChange]:
    rules = [head_rules(policy, phase) for policy in (old, new)]
    shown = lambda rule: "dense" if rule is None else repr(rule)
    changes = []
    for layer in sorted({*rules[0], *rules[1]}):
        for head in range(max(old.model.q_heads, new.model.q_heads)):
            was, now = (found.get(layer, {}).get(head) for found in rules)
            if was != now:
                changes.append(HeadChange(phase, layer, head, shown(was), shown(now)))
    return changes


def _changes(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for name in sorted({*old, *new})
            for change in _changes(f"{path}.{name}".lstrip("."), old.get(name), new.get(name))
        ]
    return [] if old == new else [(path, old, new)]
