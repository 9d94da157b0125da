"""The policy of the engine in this process: read, held against vLLM's configuration, resolved for this process's heads.

Knows vLLM's configuration by the names of its fields alone, and imports none of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from functools import partial
from typing import Any

from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.background import Background
from dynaxx.integrations.counts import Counts
from dynaxx.integrations.paged import Sequences
from dynaxx.integrations.paged_layer import PagedLayer, Step, Watcher
from dynaxx.integrations.passes import Deployed
from dynaxx.policy import KILL_SWITCH, KillSwitch, ModelFacts, Policy, PolicyFollower, load_policy, policy_digest
from dynaxx.telemetry import recorder
from dynaxx.telemetry.snapshot import Snapshot

POLICY_VARIABLE = "DYNAXX_POLICY"  # the policy file
FOLLOW_VARIABLE = "DYNAXX_FOLLOW"  # "1": a changed file comes into force while the engine runs
PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")

logger = logging.getLogger("dynaxx")


class Engine:
    """One engine's policy at work in this process.

    Attributes:
        path: the policy file.
        layers: by index, those that may run sparse; all others are vLLM's own.
        counts: what layer calls did.
        kill_switch: `engage()` makes everything dense from the next step on.
        watchers: called with the layer and the layout of every sequence that runs sparse.

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
        self._config = weakref.ref(vllm_config)
        self._shard = (rank, vllm_config.parallel_config.tensor_parallel_size)
        name = str(getattr(vllm_config.model_config, "served_model_name", None) or policy.model.model_type)
        self._numbers = recorder().bind(model_name=name, engine=str(_engine_number(vllm_config)))
        self._background = Background(partial(self._numbers.failed, "guard"))
        self.counts = Counts(self._numbers)
        self._killed: str | None = None
        self._deploying = threading.Lock()
        self._deployed = self._ready(policy)
        self._follower: PolicyFollower | None = None
        if os.environ.get(FOLLOW_VARIABLE) == "1":
            self._follower = PolicyFollower(path, self.replace, self._refused)
            self._follower.start()
        self._tell_policy()

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._deployed.policy

    @property
    def decodes(self) -> bool:
        """Whether some layer has a decode rule."""
        return bool(self._deployed.decode)

    def serves(self, vllm_config: Any) -> bool:
        """Whether this is the engine of that configuration."""
        return self._config() is vllm_config

    def bind(self, index: int, layer: Any) -> PagedLayer | None:
        """Take one attention layer of the engine.

        Args:
            index: of the layer in the model.
            layer: vLLM's `Attention`.

        Returns:
            What runs it; None where no rule covers it or it has a window of its own.
        """
        deployed = self._deployed
        if (index not in deployed.plans and index not in deployed.decode) or layer.sliding_window is not None:
            return None
        reasons = _layer_refusals(layer)
        if reasons:
            raise UnsupportedInputError(
                f"layer {index} of {self.policy.model.model_type} with a rule", {"vllm": reasons}
            )
        self.layers[index] = PagedLayer(index, float(layer.impl.scale), self.counts, self.watchers)
        return self.layers[index]

    def step(self, sequences: Sequences) -> Step:
        """Decide what holds for a step that starts."""
        killed = self.kill_switch.engaged()
        if killed != self._killed:
            before, self._killed = self._killed, killed
            self._numbers.set("dynaxx_kill_switch", killed is not None)
            if (before is None) != (killed is None):
                event = "kill_switch_off" if killed is None else "kill_switch_on"
                self._numbers.event(event, reason=str(killed or before))
        return Step(sequences, self._deployed, killed=killed is not None)

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
                self._numbers.set("dynaxx_policy_stale", 0)
                return False
            deployed = self._ready(policy)
            new = sorted({*deployed.plans, *deployed.decode} - set(self.layers))
            if new:
                raise PolicyError(f"rules for layers {new}, which are vLLM's own since the engine started: restart it")
            self._deployed = deployed
        self._numbers.add("dynaxx_policy_reloads_total", result="ok")
        self._tell_policy()
        return True

    def status(self) -> dict[str, Any]:
        """What is active, and what ran; plain data."""
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
        config = self._config()
        assert config is not None, "an engine outlives no configuration"
        _check_model(policy.model, ModelFacts.of(config.model_config.hf_text_config))
        reasons = _policy_refusals(policy, self._shard[1]) + _config_refusals(config)
        if reasons:
            raise UnsupportedInputError(f"{self.path} with {policy.model.model_type}", {"vllm": reasons})
        deployed = Deployed(policy, self._numbers, self._background)
        content = [index for index, plan in deployed.plans.items() if plan.needs_tokens]
        if content:
            reasons = [f"rules of layers {content} look at content: vLLM hands its backends no token ids"]
            raise UnsupportedInputError(f"{self.path} with {policy.model.model_type}", {"vllm": reasons})
        if deployed.decode:
            reasons = _decode_refusals(config, deployed)
            if reasons:
                raise UnsupportedInputError(f"decode rules of {self.path}", {"vllm": reasons})
        deployed.plans = {index: plan.shard(*self._shard) for index, plan in deployed.plans.items()}
        return deployed

    def _refused(self, reason: str) -> None:
        self._numbers.add("dynaxx_policy_reloads_total", result="failed")
        self._numbers.set("dynaxx_policy_stale", 1)
        self._numbers.event("policy_refused", reason=reason)

    def _tell_policy(self) -> None:
        numbers = self._numbers
        numbers.info("dynaxx_policy_info", version=str(self.policy.version), digest=policy_digest(self.policy))
        numbers.set("dynaxx_policy_loaded_timestamp_seconds", time.time())
        numbers.set("dynaxx_policy_stale", 0)
        numbers.event("policy_loaded")


_current: Engine | None = None


def policy_path() -> str | None:
    """The policy file that the environment names."""
    return os.environ.get(POLICY_VARIABLE) or None


def current() -> Engine | None:
    """The engine of this process, the latest where several were made."""
    return _current


def engine_of(vllm_config: Any, rank: int) -> Engine | None:
    """The engine of a configuration, made at its first layer; None without a policy. Errors as `Engine`.

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


def _check_model(wanted: ModelFacts, found: ModelFacts) -> None:
    for name in ModelFacts.model_fields:
        if getattr(wanted, name) != getattr(found, name):
            raise PolicyError(
                f"`model.{name}` is {getattr(wanted, name)!r} in the policy and {getattr(found, name)!r} in the model: "
                "the policy was made for another model; tune one for this"
            )


def _policy_refusals(policy: Policy, ranks: int) -> list[str]:
    """What of a policy has no meaning in vLLM."""
    reasons = []
    if policy.rollout.share != 1.0 or policy.rollout.flag is not None:
        reasons.append(
            "`rollout.share` and `rollout.flag` choose requests by id, which vLLM does not hand to its backends: set "
            "share to 1.0 and send a part of the traffic to engines with a policy"
        )
    if policy.guard is not None and ranks > 1:
        reasons.append("`guard` watches whole layers, and tensor parallelism cuts them: remove it")
    return reasons


def _config_refusals(vllm_config: Any) -> list[str]:
    """Why no policy can be served with such a configuration."""
    reasons = []
    cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
    if cache.cache_dtype not in PLAIN_CACHES:
        reasons.append(f"kv cache dtype {cache.cache_dtype!r} is not served; use --kv-cache-dtype auto")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            reasons.append(f"{name} = {getattr(parallel, name)}: context parallelism is not served; use 1")
    if getattr(model, "rswa_window", None) is not None:
        reasons.append("the model's reference sliding window is not served")
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append("prefixes that see both ways are not served")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        reasons.append(f"speculative method {speculative.method!r}: a draft model has layers of its own; use ngram")
    return reasons


def _decode_refusals(vllm_config: Any, deployed: Deployed) -> list[str]:
    """Why decode rules cannot be served."""
    reasons, size = [], vllm_config.cache_config.block_size
    wrong = sorted({plan.page_size for plan in deployed.decode.values()} - {size})
    if wrong:
        reasons.append(f"the kv cache has pages of {size} tokens, the rules {wrong}; use --block-size {wrong[0]}")
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        reasons.append("budgets of kv heads are not cut for tensor parallelism; use 1")
    if vllm_config.kv_transfer_config is not None:
        reasons.append("pages from a kv connector come without the summaries that choosing needs")
    return reasons


def _layer_refusals(layer: Any) -> list[str]:
    """Why one attention layer cannot follow a rule."""
    impl, reasons = layer.impl, []
    if layer.attn_type != "decoder":
        reasons.append(f"its attention is of type {layer.attn_type!r}, not decoder")
    if getattr(impl, "sinks", None) is not None:
        reasons.append("it has learned attention sinks")
    if getattr(impl, "alibi_slopes", None) is not None:
        reasons.append("it has ALiBi slopes")
    if getattr(impl, "logits_soft_cap", None):
        reasons.append("it caps its scores")
    if layer.kv_sharing_target_layer_name is not None:
        reasons.append("it shares another layer's cache")
    if layer.head_size_v != layer.head_size:
        reasons.append("its keys and values differ in head_dim")
    return reasons
