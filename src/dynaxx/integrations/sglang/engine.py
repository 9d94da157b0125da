# SPDX-License-Identifier: Apache-2.0
"""The policy of the SGLang process: read, checked against its model runner, resolved for this rank's heads.

This module uses SGLang's objects by field names and does not import SGLang.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import Sequences, Softmax
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.policy import KILL_SWITCH, KillSwitch, ModelFacts, Policy, load_policy, policy_digest
from dynaxx.telemetry import recorder
from dynaxx.telemetry.snapshot import Snapshot

POLICY_VARIABLE = "DYNAXX_POLICY"  # the policy file
SERVED_CACHES = ("torch.float16", "torch.bfloat16", "torch.float32")

logger = logging.getLogger("dynaxx")


class Engine:
    """The policy in one SGLang process.

    Args:
        path: the policy file.
        runner: SGLang's model runner.
        share: (rank, ranks) of the heads under tensor parallelism.
        decode_graphs: whether SGLang captures decoding in CUDA graphs.

    Attributes:
        counts: the outcomes of layer calls.
        kill_switch: `engage()` makes everything dense from the next step on.
        layers: the layers that have run, by index.

    Raises:
        FileNotFoundError: there is no policy file.
        PolicyError: the policy is invalid, or for another model.
        UnsupportedInputError: SGLang's configuration cannot serve the policy exactly; the error lists the reasons.
    """

    def __init__(self, path: str, runner: Any, share: tuple[int, int], *, decode_graphs: bool) -> None:
        policy = load_policy(path)
        policy.model.check(ModelFacts.of(runner.model_config.hf_text_config))
        name = str(getattr(runner.server_args, "served_model_name", None) or policy.model.model_type)
        numbers = recorder().bind(model_name=name, engine="0")
        self.path, self.layers = path, dict[int, PagedLayer]()
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.counts = Counts(numbers)
        self._numbers, self._policy_events = numbers, PolicyEvents(numbers)
        reasons = refusals(policy, runner, share[1])
        if not reasons:
            background = Background(partial(numbers.failed, "guard"))
            self.deployed = Deployed(policy, numbers, background, head_share=share)
            reasons = deployed_refusals(self.deployed, runner, decode_graphs=decode_graphs)
        if reasons:
            raise UnsupportedInputError(f"{path} with {policy.model.model_type}", {"sglang": reasons})
        self._policy_events.in_force(self.deployed)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.deployed.policy

    def layer(self, index: int, softmax: Softmax) -> PagedLayer:
        """Return the object that runs a layer, made at its first call."""
        if index not in self.layers:
            self.layers[index] = PagedLayer(index, softmax, self.counts)
        return self.layers[index]

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


def refusals(policy: Policy, runner: Any, ranks: int) -> list[str]:
    """Return the reasons why SGLang cannot serve a policy exactly."""
    reasons = []
    if policy.rollout.share != 1.0 or policy.rollout.flag is not None:
        reasons.append("`rollout.share` and `rollout.flag` choose requests by id; set share to 1.0, remove the flag")
    if policy.reuse > 1:
        reasons.append("`reuse` shares a selection between layers; set it to 1")
    if policy.guard is not None:
        reasons.append("`guard` is not supported; remove it")
    if runner.use_mla_backend:
        reasons.append("latent attention (MLA) is not supported")
    if str(runner.kv_cache_dtype) not in SERVED_CACHES:
        reasons.append(f"kv cache dtype {runner.kv_cache_dtype} is not supported; use --kv-cache-dtype auto")
    if getattr(runner, "kv_index_translator", None) is not None or hasattr(runner.token_to_kv_pool, "swa_kv_pool"):
        reasons.append("separate caches for windows and full attention are not supported")
    if ranks > 1 and policy.model.kv_heads % ranks:
        reasons.append(f"{policy.model.kv_heads} kv heads cannot be split over {ranks} ranks")
    return reasons


def deployed_refusals(deployed: Deployed, runner: Any, *, decode_graphs: bool) -> list[str]:
    """Return the reasons why some rules cannot be served."""
    reasons = []
    content = [index for index, plan in deployed.plans.items() if plan.needs_tokens]
    if content:
        reasons.append(f"rules of layers {content} need token ids, which SGLang does not pass to its backends")
    wrong = sorted({plan.page_size for plan in deployed.decode.values()} - {runner.page_size})
    if wrong:
        reasons.append(f"the kv cache has pages of {runner.page_size} tokens, decode rules {wrong}; "
                       f"use --page-size {wrong[0]}")  # fmt: skip
    if deployed.decode and decode_graphs:
        reasons.append("decode rules do not run in SGLang's CUDA graphs; use --disable-cuda-graph, or remove them")
    return reasons


_current: Engine | None = None


def policy_path() -> str | None:
    """Return the policy file that the environment names."""
    return os.environ.get(POLICY_VARIABLE) or None


def current() -> Engine | None:
    """Return the engine of this process, the latest if there are several."""
    return _current


def start(runner: Any, share: tuple[int, int], *, decode_graphs: bool) -> Engine:
    """Create the engine of this process.

    Raises:
        UnsupportedInputError: no policy is named; else see `Engine`.
    """
    global _current
    path = policy_path()
    if path is None:
        raise UnsupportedInputError("the attention backend dynaxx", {"sglang": [f"{POLICY_VARIABLE} is not set"]})
    _current = Engine(path, runner, share, decode_graphs=decode_graphs)
    return _current
