# SPDX-License-Identifier: Apache-2.0
"""The policy of the engine in this process: read, held against vLLM's configuration, resolved for this process's heads.

Knows vLLM's configuration by the names of its fields alone, and imports none of it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import Sequences, Softmax
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step, Watcher
from dynaxx.integrations.runtime.policy_events import Announcer
from dynaxx.integrations.vllm.refusals import (
    config_refusals,
    deployed_refusals,
    layer_refusals,
    policy_refusals,
)
from dynaxx.policy import (
    KILL_SWITCH,
    KillSwitch,
    LayerPlan,
    ModelFacts,
    Policy,
    PolicyFollower,
    load_policy,
    policy_digest,
)
from dynaxx.policy.decode import DecodePlan
from dynaxx.telemetry import recorder
from dynaxx.telemetry.snapshot import Snapshot

POLICY_VARIABLE = "DYNAXX_POLICY"  # the policy file
FOLLOW_VARIABLE = "DYNAXX_FOLLOW"  # "1": a changed file comes into force while the engine runs

logger = logging.getLogger("dynaxx")


class Engine:
    """One engine's policy at work in this process.

    Attributes:
        path: the policy file.
        layers: by index, those that may run sparse; all others are vLLM's own.
        counts: what layer calls did.
        kill_switch: `engage()` makes everything dense from the next step on.
        watchers: called with the layer and the layout of every sequence that runs sparse.
        prepared: rules whose kernels are compiled.
        captured: whether CUDA graphs hold the decode rules, which then stay as they are.

    Raises:
        FileNotFoundError, PolicyError: no policy, a broken one, or one for another model.
        UnsupportedInputError: something in the policy or in vLLM's configuration that cannot be served rightly; with
            the reasons.
    """

    def __init__(self, path: str, vllm_config: Any, rank: int) -> None:
        policy = load_policy(path)
        self.path = path
        self.layers: dict[int, PagedLayer] = {}
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.watchers: list[Watcher] = []
        self.captured = False
        self.prepared: set[Hashable] = set()
        self._config = weakref.ref(vllm_config)
        self._shard = (rank, vllm_config.parallel_config.tensor_parallel_size)
        name = str(getattr(vllm_config.model_config, "served_model_name", None) or policy.model.model_type)
        self._numbers = recorder().bind(model_name=name, engine=str(_engine_number(vllm_config)))
        self._background = Background(partial(self._numbers.failed, "guard"))
        self.counts = Counts(self._numbers)
        self._announcer = Announcer(self._numbers)
        self._deploying = threading.Lock()
        self._in_force: Deployed | None = None
        self._in_force = self._ready(policy)
        self._follower: PolicyFollower | None = None
        if os.environ.get(FOLLOW_VARIABLE) == "1":
            self._follower = PolicyFollower(path, self.replace, self._announcer.refused)
            self._follower.start()
        self._announcer.in_force(self._deployed)

    @property
    def _deployed(self) -> Deployed:
        assert self._in_force is not None, "made with the engine"
        return self._in_force

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._deployed.policy

    @property
    def plans(self) -> Mapping[int, LayerPlan]:
        """By layer, this process's share of the prefill rules in force."""
        return self._deployed.plans

    @property
    def decode_plans(self) -> Mapping[int, DecodePlan]:
        """By layer, this process's share of the decode rules in force."""
        return self._deployed.decode

    @property
    def config(self) -> Any:
        """vLLM's configuration."""
        config = self._config()
        assert config is not None, "an engine outlives no configuration"
        return config

    def decoding(self, layers: Sequence[PagedLayer]) -> list[int]:
        """Those of some layers that have a decode rule, in the order in which a pass runs them."""
        return sorted(paged.index for paged in layers if paged.index in self._deployed.decode)

    def serves(self, vllm_config: Any) -> bool:
        """Whether this is the engine of that configuration."""
        return self._config() is vllm_config

    def bind(self, index: int, layer: Any, page_size: int) -> PagedLayer | None:
        """Take one attention layer of the engine.

        Args:
            index: of the layer in the model.
            layer: vLLM's `Attention`.
            page_size: tokens of a page of its cache.

        Returns:
            What runs it; None where no rule covers it or it has a window of its own.
        """
        deployed = self._deployed
        if (index not in deployed.plans and index not in deployed.decode) or layer.sliding_window is not None:
            return None
        reasons, decode = layer_refusals(layer, guarded=deployed.guard is not None), deployed.decode.get(index)
        if decode is not None and decode.page_size != page_size:
            reasons.append(f"its pages have {page_size} tokens, its decode rule {decode.page_size}")
        if reasons:
            raise UnsupportedInputError(
                f"layer {index} of {self.policy.model.model_type} with a rule", {"vllm": reasons}
            )
        self.layers[index] = PagedLayer(index, softmax_of(layer.impl), self.counts, self.watchers)
        return self.layers[index]

    def step(self, sequences: Sequences) -> Step:
        """Decide what holds for a step that starts."""
        return Step(sequences, self._deployed, killed=self._announcer.killed(self.kill_switch.engaged()))

    def replace(self, policy: Policy) -> bool:
        """Put another policy in force from the next step on.

        Returns:
            Whether it differs from the one in force.

        Raises:
            PolicyError, UnsupportedInputError: as for the class, or rules for layers that had none when the engine
                started; the old policy stays in force.
        """
        with self._deploying:
            if policy == self.policy:
                self._announcer.unchanged()
                return False
            deployed = self._ready(policy)
            new = sorted({*deployed.plans, *deployed.decode} - set(self.layers))
            if new:
                raise PolicyError(f"rules for layers {new}, which are vLLM's own since the engine started: restart it")
            if self.captured and deployed.decode != self._deployed.decode:
                raise PolicyError(
                    "other decode rules than those that CUDA graphs were captured with: restart the engine"
                )
            self._in_force = deployed
        self._announcer.reloaded(deployed)
        return True

    def status(self) -> dict[str, Any]:
        """Return what is active, and what ran; plain data."""
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

    def _ready(self, policy: Policy) -> Deployed:
        config = self.config
        policy.model.check(ModelFacts.of(config.model_config.hf_text_config))
        reasons = policy_refusals(policy, self._shard[1]) + config_refusals(config)
        self._refuse(policy, reasons)
        deployed = Deployed(policy, self._numbers, self._background, self._in_force, head_share=self._shard)
        self._refuse(policy, deployed_refusals(config, deployed))
        return deployed

    def _refuse(self, policy: Policy, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedInputError(f"{self.path} with {policy.model.model_type}", {"vllm": reasons})


def softmax_of(impl: Any) -> Softmax:
    """Return the softmax of one of vLLM's attention implementations."""
    return Softmax(float(impl.scale), getattr(impl, "logits_soft_cap", None) or None, getattr(impl, "sinks", None))


_current: Engine | None = None


def policy_path() -> str | None:
    """Return the policy file that the environment names."""
    return os.environ.get(POLICY_VARIABLE) or None


def current() -> Engine | None:
    """Return the engine of this process, the latest where several were made."""
    return _current


def engine_of(vllm_config: Any, rank: int) -> Engine | None:
    """Return the engine of a configuration, made at its first layer; None without a policy. Errors as `Engine`.

    Args:
        rank: which of the `tensor_parallel_size` shares of the heads this process has.
    """
    global _current
    if _current is None or not _current.serves(vllm_config):
        path = policy_path()
        _current = None if path is None else Engine(path, vllm_config, rank)
    return _current


def _engine_number(vllm_config: Any) -> int:
    return getattr(vllm_config.parallel_config, "data_parallel_rank", 0)
