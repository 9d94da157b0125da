# SPDX-License-Identifier: Apache-2.0
"""The policy of the engine in this process: read, checked against vLLM's configuration, resolved for this rank's heads.

This module uses vLLM's configuration by field names and does not import vLLM.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.forks import new_lock
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import Sequences, Softmax
from dynaxx.integrations.runtime.paged_layer import PagedLayer, Step, Watcher
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.policy import (
    KILL_SWITCH,
    KillSwitch,
    LayerPlan,
    ModelFacts,
    Policy,
    PolicyFollower,
    Rollout,
    load_policy,
    policy_digest,
)
from dynaxx.policy.resolve import DecodePlan
from dynaxx.telemetry import Recorder, recorder
from dynaxx.telemetry.snapshot import Snapshot

POLICY_VARIABLE = "DYNAXX_POLICY"  # the policy file
FOLLOW_VARIABLE = "DYNAXX_FOLLOW"  # "1": a changed file comes into force while the engine runs


class Engine:
    """The policy of one engine in this process.

    Attributes:
        path: the policy file.
        layers: the layers that may run sparse, by index; all others belong to vLLM.
        counts: the outcomes of layer calls.
        kill_switch: `engage()` makes everything dense from the next step on.
        watchers: functions called with the layer and the layout of every sequence that runs sparse.
        prepared: rules whose kernels are compiled.
        captured: whether CUDA graphs contain the decode rules, which then cannot change.

    Raises:
        FileNotFoundError: there is no policy file.
        PolicyError: the policy is invalid, or for another model.
        UnsupportedInputError: vLLM's configuration cannot serve the policy exactly; the error lists the reasons.
    """

    def __init__(self, path: str, vllm_config: Any, rank: int) -> None:
        policy = load_policy(path)
        name = str(getattr(vllm_config.model_config, "served_model_name", None) or policy.model.model_type)
        self._numbers = recorder().bind(model_name=name, engine=str(_engine_number(vllm_config)))
        self._policy_events = PolicyEvents(self._numbers)
        self.path = path
        self.layers: dict[int, PagedLayer] = {}
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.counts = Counts(self._numbers)
        self.watchers: list[Watcher] = []
        self.captured = False
        self.prepared: set[Hashable] = set()
        self._config = weakref.ref(vllm_config)
        self._shard = (rank, vllm_config.parallel_config.tensor_parallel_size)
        self._background = Background(partial(self._numbers.failed, "guard"))
        self._deploying = new_lock()
        self._in_force: Deployed | None = None
        self._in_force = self._ready(policy)
        self._follower: PolicyFollower | None = None
        if os.environ.get(FOLLOW_VARIABLE) == "1":
            self._follower = PolicyFollower(path, self.replace, self._policy_events.refused)
            self._follower.start()
        self._policy_events.in_force(self.deployed)

    @property
    def deployed(self) -> Deployed:
        """The policy in force, with its state."""
        assert self._in_force is not None, "the constructor must have set it"
        return self._in_force

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.deployed.policy

    @property
    def plans(self) -> Mapping[int, LayerPlan]:
        """This process's share of the prefill rules in force, by layer."""
        return self.deployed.plans

    @property
    def decode_plans(self) -> Mapping[int, DecodePlan]:
        """This process's share of the decode rules in force, by layer."""
        return self.deployed.decode

    @property
    def config(self) -> Any:
        """Return the configuration of vLLM."""
        config = self._config()
        assert config is not None, "the configuration must outlive the engine"
        return config

    def decoding(self, layers: Sequence[PagedLayer]) -> list[int]:
        """Return the layers that have a decode rule, in the order in which a pass runs them."""
        return sorted(paged.index for paged in layers if paged.index in self.deployed.decode)

    def unguarded(self) -> Deployed:
        """Return the policy in force without guard and roll-out, for steps of the warm-up. It counts nothing."""
        policy = self.policy.model_copy(update={"guard": None, "rollout": Rollout()})
        return Deployed(policy, Recorder(), self._background, head_share=self._shard)

    def serves(self, vllm_config: Any) -> bool:
        """Return whether this engine belongs to that configuration."""
        return self._config() is vllm_config

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

    def bind(self, index: int, layer: Any, page_size: int) -> PagedLayer | None:
        """Connect one attention layer of vLLM to the policy.

        Args:
            index: index of the layer in the model.
            layer: vLLM's `Attention`.
            page_size: tokens per page of its cache.

        Returns:
            The object that runs the layer, or None if no rule covers it or the model gives it a window.
        """
        deployed = self.deployed
        if (index not in deployed.plans and index not in deployed.decode) or layer.sliding_window is not None:
            return None
        reasons, decode = layer_refusals(layer, guarded=deployed.guard is not None), deployed.decode.get(index)
        if decode is not None and page_size % decode.page_size:
            reasons.append(f"its pages have {page_size} tokens, no multiple of its decode rule's {decode.page_size}")
        if reasons:
            raise UnsupportedInputError(
                f"layer {index} of {self.policy.model.model_type} with a rule", {"vllm": reasons}
            )
        self.layers[index] = PagedLayer(index, softmax_of(layer.impl), self.counts, self.watchers)
        return self.layers[index]

    def replace(self, policy: Policy) -> bool:
        """Put another policy in force from the next step on.

        Returns:
            Whether it differs from the policy in force.

        Raises:
            PolicyError: the policy is invalid, or has rules for layers that had none when the engine started. The old
                policy stays in force.
            UnsupportedInputError: see `Engine`. The old policy stays in force.
        """
        with self._deploying:
            if policy == self.policy:
                self._policy_events.unchanged()
                return False
            deployed = self._ready(policy)
            new = sorted({*deployed.plans, *deployed.decode} - set(self.layers))
            if new:
                raise PolicyError(f"rules for layers {new}, which had none when the engine started; restart the engine")
            if self.captured and deployed.decode != self.deployed.decode:
                raise PolicyError("the decode rules differ from those in the captured CUDA graphs; restart the engine")
            self._in_force = deployed
        self._policy_events.reloaded(deployed)
        return True

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


def policy_path() -> str | None:
    """Return the policy file that the environment names."""
    return os.environ.get(POLICY_VARIABLE) or None


_current: Engine | None = None


def current() -> Engine | None:
    """Return the engine of this process, the latest if there are several."""
    return _current


def engine_of(vllm_config: Any, rank: int) -> Engine | None:
    """Return the engine of a configuration, created at its first layer, or None without a policy.

    Args:
        vllm_config: vLLM's configuration.
        rank: index of this process's share among the `tensor_parallel_size` shares of the heads.

    Raises:
        FileNotFoundError: see `Engine`.
        PolicyError: see `Engine`.
        UnsupportedInputError: see `Engine`.
    """
    global _current
    if _current is None or not _current.serves(vllm_config):
        path = policy_path()
        _current = None if path is None else Engine(path, vllm_config, rank)
    return _current


def _engine_number(vllm_config: Any) -> int:
    return getattr(vllm_config.parallel_config, "data_parallel_rank", 0)


SERVED_CACHES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")


def policy_refusals(policy: Policy, ranks: int) -> list[str]:
    """Return the reasons why vLLM cannot serve the settings of a policy."""
    reasons = []
    if policy.rollout.share != 1.0 or policy.rollout.flag is not None:
        reasons.append(
            "`rollout.share` and `rollout.flag` choose requests by id, which vLLM does not pass to its backends; set "
            "share to 1.0, remove the flag, and send a part of the traffic to engines with a policy"
        )
    if policy.guard is not None and ranks > 1:
        reasons.append("`guard` watches whole layers, but tensor parallelism splits them; remove it")
    return reasons


def config_refusals(vllm_config: Any) -> list[str]:
    """Return the reasons why no policy can be served with this configuration."""
    reasons = []
    cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
    if cache.cache_dtype not in SERVED_CACHES:
        reasons.append(f"kv cache dtype {cache.cache_dtype!r} is not supported; use --kv-cache-dtype auto or fp8")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            reasons.append(f"{name} = {getattr(parallel, name)}: context parallelism is not supported; use 1")
    if getattr(model, "rswa_window", None) is not None:
        reasons.append("the model's reference sliding window is not supported")
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append("prefixes with bidirectional attention are not supported")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        reasons.append(f"speculative method {speculative.method!r}: draft models are not supported; use ngram")
    return reasons


def deployed_refusals(vllm_config: Any, deployed: Deployed) -> list[str]:
    """Return the reasons why some rules cannot be served with this configuration."""
    reasons, size = [], vllm_config.cache_config.block_size
    content = [index for index, plan in deployed.plans.items() if plan.needs_tokens]
    if content:
        reasons.append(f"rules of layers {content} need token ids, which vLLM does not pass to its backends")
    if not deployed.decode:
        return reasons
    sizes = sorted({plan.page_size for plan in deployed.decode.values()})
    if any(size % each for each in sizes):
        reasons.append(
            f"the kv cache has pages of {size} tokens, decode rules {sizes}; use --block-size {math.lcm(*sizes)}"
        )
    if len(sizes) > 1:
        reasons.append(f"decode rules have pages of {sizes} tokens, and one engine updates summaries of one size")
    if vllm_config.kv_transfer_config is not None:
        reasons.append("decode rules need page summaries, which pages from a kv connector lack; remove one of them")
    return reasons


def layer_refusals(layer: Any, *, guarded: bool) -> list[str]:
    """Return the reasons why an attention layer cannot follow a rule. `guarded` means that a guard watches it."""
    impl, reasons = layer.impl, []
    if layer.attn_type != "decoder":
        reasons.append(f"its attention is of type {layer.attn_type!r}, not decoder")
    if getattr(impl, "alibi_slopes", None) is not None:
        reasons.append("it has ALiBi slopes")
    if guarded and (getattr(impl, "sinks", None) is not None or getattr(impl, "logits_soft_cap", None)):
        reasons.append("it has learned sinks or capped scores, which `guard` cannot measure; remove the guard")
    if layer.kv_sharing_target_layer_name is not None:
        reasons.append("it shares another layer's cache")
    if layer.head_size_v != layer.head_size:
        reasons.append("its keys and values differ in head_dim")
    return reasons
