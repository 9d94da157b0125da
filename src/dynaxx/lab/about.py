# SPDX-License-Identifier: Apache-2.0
"""What a stored result is about: digests of the policy, the model, the text and the settings.

Each tool writes `about(...)` into its document. A reader shows a document only if it agrees with the others.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from dynaxx.lab.resume import fingerprint
from dynaxx.policy import Policy

NOT_RUN = {"evidence", "measured_on", "reference", "guard", "rollout"}  # fields that do not change what a policy does


def about(model: Any = None, text: str | None = None, policy: Policy | None = None, **settings: Any) -> dict[str, str]:
    """Return a short digest of each thing that is given, by name; of all settings together as "settings"."""
    found = {}
    if model is not None:
        found["model"] = fingerprint(model, torch.zeros(0, dtype=torch.int64, device="cpu"), dtype=str(model.dtype))
    if text is not None:
        found["text"] = _digest(text)
    if policy is not None:
        found["policy"] = policy_digest(policy)
    if settings:
        found["settings"] = _digest(json.dumps(settings, sort_keys=True, default=str))
    return found


def policy_digest(policy: Policy) -> str:
    """Return a digest of what a policy does: its rules and borders, but not its evidence."""
    return _digest(policy.model_dump_json(exclude=NOT_RUN))


def differing(document: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of the digests that two documents both have, and that differ."""
    mine, others = document.get("about") or {}, other.get("about") or {}
    return [name for name in mine if name in others and mine[name] != others[name]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
