# SPDX-License-Identifier: Apache-2.0
"""Report to telemetry which policy is in force, which file was refused, and whether the kill switch is on."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from dynaxx.forks import in_child, new_event
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.policy import Policy, Profile, policy_digest, save_profile
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


class StatisticsFile:
    """Write the result of `statistics` every `interval` seconds in a daemon thread, and once more when it stops.

    Args:
        path: the file.
        statistics: a method, which is referenced weakly; the thread ends when its object is collected.
        numbers: the recorder, which counts failed writes; the next interval tries again.
        interval: seconds between two writes.
    """

    def __init__(
        self, path: str | os.PathLike[str], statistics: Callable[[], Profile | None], numbers: Recorder, interval: float
    ) -> None:
        if not interval > 0:
            raise ValueError(f"`interval` must be > 0 seconds, got {interval}")
        self.path = os.fspath(path)
        self._statistics = weakref.WeakMethod(statistics)
        self._numbers = numbers
        self._stopped = new_event()
        in_child(self, lambda file: file._stopped.set())  # the file is the parent's
        self._logged = False
        threading.Thread(target=_write_on, args=(weakref.ref(self), self._stopped, interval), daemon=True).start()

    def write(self) -> bool:
        """Write now. Return whether there was something to write and the write succeeded. Never raises."""
        statistics = self._statistics()
        try:
            profile = None if statistics is None else statistics()
            if profile is None:
                return False
            save_profile(profile, self.path)
        except Exception as error:
            self._numbers.failed("statistics file", error)
            if not self._logged:
                self._logged = True
                self._numbers.event("telemetry_failed", what="statistics file")
            return False
        self._logged = False
        return True

    def stop(self) -> None:
        """Write a last time, and stop the thread."""
        if not self._stopped.is_set():
            self._stopped.set()
            self.write()


def _write_on(file: weakref.ref[StatisticsFile], stopped: threading.Event, interval: float) -> None:
    while not stopped.wait(interval):
        alive = file()
        if alive is None:
            return
        alive.write()
        del alive
