# SPDX-License-Identifier: Apache-2.0
"""The policy of a serving engine's process: what the plugins of vLLM and SGLang have in common."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from typing import Any

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import Sequences
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.policy import KILL_SWITCH, KillSwitch, Policy, policy_digest
from dynaxx.telemetry import Recorder
from dynaxx.telemetry.snapshot import Snapshot

POLICY_VARIABLE = "DYNAXX_POLICY"  # the policy file

logger = logging.getLogger("dynaxx")


class ServedPolicy(ABC):
    """The policy in one process of a serving engine. A subclass sets what is in force and fills `layers`.

    Args:
        path: the policy file.
        numbers: the recorder of this engine.

    Attributes:
        path: the policy file.
        layers: the layers that may run sparse, by index.
        counts: the outcomes of layer calls.
        kill_switch: `engage()` makes everything dense from the next step on.
    """

    def __init__(self, path: str, numbers: Recorder) -> None:
        self.path = path
        self.layers: dict[int, PagedLayer] = {}
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.counts = Counts(numbers)
        self._numbers, self._policy_events = numbers, PolicyEvents(numbers)

    @property
    @abstractmethod
    def deployed(self) -> Deployed:
        """The policy in force, with its state."""

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.deployed.policy

    def step(self, sequences: Sequences) -> Step:
        """Return a step with the policy and state that apply to it."""
        return Step(sequences, self.deployed, killed=self._policy_events.killed(self.kill_switch.engaged()))

    def status(self) -> dict[str, Any]:
        """Return the state and the counts as plain data."""
        return {
            "active": bool(self.layers),
            "policy": self.path,
            "digest": policy_digest(self.policy),
            "killed": self.kill_switch.engaged(),
            "sparse_layers": sorted(self.layers),
            "layers": self.policy.model.layers,
            "density": Snapshot.of(self._numbers).mean("dynaxx_density_ratio"),
            **self.counts.to_dict(),
        }


def policy_path() -> str | None:
    """Return the policy file that the environment names."""
    return os.environ.get(POLICY_VARIABLE) or None


def status_of(served: ServedPolicy | None, not_started: str) -> dict[str, Any]:
    """Return the state of the policy in this process as plain data.

    Args:
        served: the policy of this process; None if the engine never asked for it.
        not_started: the reason for None although the environment names a policy.

    Returns:
        "active": whether layers follow it, otherwise "reason". "policy": its file, with its "digest". "killed": what
        engages the kill switch, or None. "sparse_layers": indices of the sparse layers among "layers". "density": the
        mean of sampled sparse calls. "sparse_calls", "dense_calls", "dense_sequences": see `Handle.stats`.
    """
    if served is None:
        return {"active": False, "reason": not_started if policy_path() else f"{POLICY_VARIABLE} is not set"}
    return served.status()


def switch(served: ServedPolicy | None, enabled: bool, not_started: str) -> dict[str, Any]:
    """Turn sparse attention on or off from the next step on, and return `status_of`.

    Raises:
        RuntimeError: no policy is active in this process.
    """
    if served is None:
        raise RuntimeError(f"no policy is active in this process: {status_of(None, not_started)['reason']}")
    if enabled:
        served.kill_switch.release()
    else:
        served.kill_switch.engage()
    logger.info("sparse attention is switched %s", "on" if enabled else "off")
    return served.status()
