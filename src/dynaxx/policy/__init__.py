# SPDX-License-Identifier: Apache-2.0
"""The policy: a document that says what runs where, its file, and the plan for each layer that it resolves to.

The files:

    schema, document, facts, files  the document and its file
    explaining                      errors of a document, with their fixes
    rule, specs                     rules as data
    resolve, plan                   what each layer does
    rollout, kill, reload           which requests follow a policy, and which policy
    guard, drift, profile           measurements on running traffic
    renew, diff                     new policies from old ones

This room also decides which requests a policy applies to (rollout), watches it (guard, drift) and stops it (kill
switch). Importing it imports pydantic.
"""

from dynaxx.policy.drift import Drift, DriftDetector
from dynaxx.policy.facts import Evidence, MeasuredOn, ModelFacts, Tolerances
from dynaxx.policy.files import (
    load_policy,
    load_profile,
    parse_policy,
    policy_digest,
    policy_text,
    rules_digest,
    save_policy,
    save_profile,
)
from dynaxx.policy.guard import Guard
from dynaxx.policy.kill import KILL_SWITCH, KillSwitch
from dynaxx.policy.plan import HeadGroup, LayerPlan
from dynaxx.policy.profile import LayerProfile, Profile
from dynaxx.policy.reload import PolicyFollower
from dynaxx.policy.resolve import resolve
from dynaxx.policy.rollout import LengthSwitch, Rollout, request
from dynaxx.policy.rule import Rule
from dynaxx.policy.schema import Policy
from dynaxx.policy.specs import to_spec

__all__ = [
    "KILL_SWITCH",
    "Drift",
    "DriftDetector",
    "Evidence",
    "Guard",
    "HeadGroup",
    "KillSwitch",
    "LayerPlan",
    "LayerProfile",
    "LengthSwitch",
    "MeasuredOn",
    "ModelFacts",
    "Policy",
    "PolicyFollower",
    "Profile",
    "Rollout",
    "Rule",
    "Tolerances",
    "load_policy",
    "load_profile",
    "parse_policy",
    "policy_digest",
    "policy_text",
    "request",
    "resolve",
    "rules_digest",
    "save_policy",
    "save_profile",
    "to_spec",
]
