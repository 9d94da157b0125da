"""What runs where: the policy document, its file, and the plan it resolves to per layer. Imports pydantic."""

from dynaxx.policy.files import load_policy, parse_policy, policy_text, save_policy
from dynaxx.policy.resolve import HeadGroup, LayerPlan, LengthSwitch, resolve
from dynaxx.policy.schema import Evidence, MeasuredOn, ModelFacts, Policy, Rule, Tolerances
from dynaxx.policy.specs import to_spec

__all__ = [
    "Evidence",
    "HeadGroup",
    "LayerPlan",
    "LengthSwitch",
    "MeasuredOn",
    "ModelFacts",
    "Policy",
    "Rule",
    "Tolerances",
    "load_policy",
    "parse_policy",
    "policy_text",
    "resolve",
    "save_policy",
    "to_spec",
]
