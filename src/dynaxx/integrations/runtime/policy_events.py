# SPDX-License-Identifier: Apache-2.0
"""Report to telemetry which policy is in force, which file was refused, and whether the kill switch is on."""

from __future__ import annotations

import logging
import time

from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.policy import Policy, policy_digest
from dynaxx.telemetry import Recorder


class PolicyEvents:
    """Report changes of one model or engine to telemetry."""

    def __init__(self, numbers: Recorder) -> None:
        self._numbers = numbers
        self._killed_by: str | None = None

    def in_force(self, deployed: Deployed) -> None:
        """Report that a policy came into force."""
        numbers, policy, guard = self._numbers, deployed.policy, deployed.guard
        numbers.info("dynaxx_policy_info", version=str(policy.version), digest=policy_digest(policy))
        numbers.set("dynaxx_policy_loaded_timestamp_seconds", time.time())
        numbers.set("dynaxx_rollout_ratio", policy.rollout.share)
        numbers.set("dynaxx_guard_level", 0 if guard is None else int(guard.worst))
        self.unchanged()
        numbers.event("policy_loaded")

    def reloaded(self, deployed: Deployed) -> None:
        """Report that a new policy replaced the previous one."""
        self._numbers.add("dynaxx_policy_reloads_total", result="ok")
        self.in_force(deployed)

    def unchanged(self) -> None:
        """Report that the policy in force equals its file."""
        self._numbers.set("dynaxx_policy_stale", 0)

    def refused(self, reason: str) -> None:
        """Report that a new policy file was refused."""
        self._numbers.add("dynaxx_policy_reloads_total", result="failed")
        self._numbers.set("dynaxx_policy_stale", 1)
        self._numbers.event("policy_refused", reason=reason)

    def removed(self) -> None:
        """Report that the policy was removed."""
        self._numbers.event("policy_removed")

    def killed(self, by: str | None) -> bool:
        """Report what engages the kill switch (see `KillSwitch.engaged`), and return whether it is engaged."""
        if by != self._killed_by:
            before, self._killed_by = self._killed_by, by
            self._numbers.set("dynaxx_kill_switch", by is not None)
            if (before is None) != (by is None):
                self._numbers.event("kill_switch_off" if by is None else "kill_switch_on", reason=str(by or before))
        return by is not None


logger = logging.getLogger("dynaxx")


def without_guard(policy: Policy, engine: str) -> Policy:
    """Return the policy without its guard, and warn that nothing measures its errors in this engine.

    Tuned policies have a guard. Refusing them would keep them out of engines whose attention they can run.
    """
    if policy.guard is None:
        return policy
    logger.warning("the policy's guard does not run in %s: nothing measures the policy's errors there", engine)
    return policy.replace(guard=None)
