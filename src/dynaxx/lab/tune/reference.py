# SPDX-License-Identifier: Apache-2.0
"""Record the reference of a tuned policy: attention statistics on its text, the baseline for drift."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dynaxx.lab.models import LoadedModel
from dynaxx.lab.progress import Progress
from dynaxx.lab.resume import Steps
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.tune.result import TuneResult

if TYPE_CHECKING:
    from dynaxx.policy import Profile

SHARE = 0.25  # largest time of the recording, as a share of the time spent so far


def with_reference(
    result: TuneResult,
    loaded: LoadedModel,
    text: str,
    command: str,
    seed: int,
    steps: Steps,
    time: TimeBudget,
    progress: Progress,
) -> TuneResult:
    """Return the result with a policy that has a guard and a reference.

    If the reference cannot be recorded (no time, too little text, or a dense policy), `reference` says why.
    """
    from dynaxx.lab.tune.retune import MIN_REQUESTS, record
    from dynaxx.policy import Guard, Profile, rules_digest

    policy = result.policy
    if all(rule.phase == "decode" for rule in policy.rules):
        return dataclasses.replace(result, reference="none: prompts run dense")
    border = policy.border
    if not time.allows(MIN_REQUESTS * time.expects(PASS, max(2, border))):
        return dataclasses.replace(result, reference="none: no time was left to record it")

    def recorded() -> dict[str, Any]:
        found: Profile = record(
            policy,
            loaded,
            text,
            time_budget=min(SHARE * (steps.seconds + time.spent), time.left),
            time_limit=time.left,
            seed=seed,
            command=command,
            progress=progress,
        )
        return found.model_dump(mode="json")

    try:
        found = Profile.model_validate(steps.remember(f"reference {rules_digest(policy)}", recorded))
    except ValueError as error:  # the policy is useful without a reference
        return dataclasses.replace(result, reference=f"none: {error}")
    said = f"{found.requests} prompts, {min(each.calls for each in found.layers)} calls a layer"
    return dataclasses.replace(result, policy=policy.replace(guard=Guard(), reference=found), reference=said)
