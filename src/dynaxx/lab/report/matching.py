# SPDX-License-Identifier: Apache-2.0
"""Find the documents of a folder that are about the same policy, model and text; the others are not shown."""

from __future__ import annotations

from typing import Any

from dynaxx.lab.about import differing, policy_digest
from dynaxx.printable import printable

SAME = {
    "tuning": ("policy", "model", "text"),
    "validation": ("policy", "model"),  # a policy may be validated on any text
    "profile": ("model", "text"),
    "analysis": ("model", "text"),
}  # what each document must be about, in the order in which they decide
ANCHORS = {"tuning": ("policy", "model", "text"), "validation": ("policy", "model")}  # what others are held against


def mismatches(documents: dict[str, Any]) -> dict[str, str]:
    """Return why a document is not about the policy, or the model and text, of the others, by its name.

    The policy of the folder decides, then what was tuned, validated, profiled and analyzed, in this order.
    """
    known: dict[str, str] = {}
    problems = {}
    if "policy" in documents:
        try:
            known["policy"] = _digest_of(documents["policy"])
        except ValueError as error:
            line = printable(str(error).partition("\n")[0], most=200)
            problems["policy"] = f"policy.json is no policy of this version ({line})."
    for name, keys in SAME.items():
        if name not in documents:
            continue
        about = documents[name].get("about")
        if not isinstance(about, dict) or any(not isinstance(about.get(key), str) for key in keys):
            problems[name] = f"{name}.json does not say what it is about, as files of older versions do not."
            continue
        others = differing({"about": {key: about[key] for key in keys}}, {"about": known})
        if others:
            newer = ", or of another version of dynaxx" if "model" in others else ""
            problems[name] = f"{name}.json is about another {' and another '.join(others)}{newer}, so it is not shown."
            continue
        known = {key: about[key] for key in ANCHORS.get(name, keys)} | known
    return problems


def _digest_of(document: dict[str, Any]) -> str:
    """Return the digest of a policy. Raises ValueError if it is none."""
    from pydantic import ValidationError

    from dynaxx.policy import Policy
    from dynaxx.policy.schema import explain_errors

    try:
        return policy_digest(Policy.model_validate(document))
    except ValidationError as error:
        raise ValueError(explain_errors(error)) from None
