"""The policy of the engine in this process: read, held against the engine's configuration, resolved for its heads.

Knows vLLM's configuration by the names of its fields alone, and imports none of it.
"""

from __future__ import annotations

import logging
import os
import weakref
from functools import cached_property
from typing import Any

from dynaxx.errors import PolicyError, UnsupportedInputError
from dynaxx.integrations.paged import Counts, PagedLayer
from dynaxx.policy import LayerPlan, ModelFacts, Policy, load_policy, resolve

POLICY_VARIABLE = "DYNAXX_POLICY"

logger = logging.getLogger("dynaxx")


class Engine:
    """One engine's policy at work in this process.

    Attributes:
        path, policy: as `DYNAXX_POLICY` named it when the engine started.
        layers: by index, those that follow a rule; all others are vLLM's own.
        counts: what ran since the start.
        enabled: False keeps every sequence dense; may be set at any time.

    Raises:
        FileNotFoundError, PolicyError: no policy, a broken one, or one for another model.
        UnsupportedInputError: something in vLLM's configuration that cannot be served rightly; with the reasons.
    """

    def __init__(self, path: str, vllm_config: Any) -> None:
        self.path = path
        self.policy: Policy = load_policy(path)
        self._config = weakref.ref(vllm_config)
        _check_model(path, self.policy.model, ModelFacts.of(vllm_config.model_config.hf_text_config))
        reasons = _refusals(vllm_config, self._plans)
        if reasons:
            raise UnsupportedInputError(f"{self.policy.model.model_type} with {path}", {"vllm": reasons})
        self.layers: dict[int, PagedLayer] = {}
        self.counts = Counts()
        self.enabled = True

    @cached_property
    def _plans(self) -> dict[int, LayerPlan]:
        return resolve(self.policy)

    def serves(self, vllm_config: Any) -> bool:
        """Whether this is the engine of that configuration."""
        return self._config() is vllm_config

    def bind(self, index: int, layer: Any, rank: int, ranks: int) -> PagedLayer | None:
        """Take one attention layer of the engine.

        Args:
            index: of the layer in the model.
            layer: vLLM's `Attention`.
            rank, ranks: which share of the heads this process has.

        Returns:
            What it does, None where no rule covers it or it has a window of its own.
        """
        plan = self._plans.get(index)
        if plan is None or layer.sliding_window is not None:
            return None
        reasons = _layer_refusals(layer)
        if reasons:
            raise UnsupportedInputError(
                f"layer {index} of {self.policy.model.model_type} with a rule", {"vllm": reasons}
            )
        sparse_from = self.policy.dense_below if self.policy.sparse_from is None else self.policy.sparse_from
        bound = PagedLayer(
            index,
            plan.shard(rank, ranks),
            sparse_from,
            float(layer.impl.scale),
            self.counts,
            lambda: self.enabled,
        )
        self.layers[index] = bound
        return bound

    def status(self) -> dict[str, Any]:
        """What is active, and what ran; plain data."""
        return {
            "active": bool(self.layers),
            "policy": self.path,
            "enabled": self.enabled,
            "sparse_layers": sorted(self.layers),
            "layers": self.policy.model.layers,
            "sparse_calls": self.counts.sparse,
            "dense_calls": dict(self.counts.dense),
            "density": self.counts.density,
        }


_current: Engine | None = None


def policy_path() -> str | None:
    """The policy file that the environment names."""
    return os.environ.get(POLICY_VARIABLE) or None


def current() -> Engine | None:
    """The engine of this process, the latest where several were made."""
    return _current


def engine_of(vllm_config: Any) -> Engine | None:
    """The engine of a configuration, made at its first layer; None without a policy. Errors as `Engine`."""
    global _current
    if _current is None or not _current.serves(vllm_config):
        path = policy_path()
        _current = None if path is None else Engine(path, vllm_config)
    return _current


def _check_model(path: str, wanted: ModelFacts, found: ModelFacts) -> None:
    for name in ModelFacts.model_fields:
        if getattr(wanted, name) != getattr(found, name):
            raise PolicyError(
                f"{path}: `model.{name}` is {getattr(wanted, name)!r} in the policy and {getattr(found, name)!r} in "
                "the model: the policy was made for another model; tune one for this"
            )


PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")


def _refusals(vllm_config: Any, plans: dict[int, LayerPlan]) -> list[str]:
    """Why an engine so configured cannot run these plans rightly."""
    reasons = []
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if vllm_config.cache_config.cache_dtype not in PLAIN_CACHES:
        reasons.append(f"kv cache dtype {vllm_config.cache_config.cache_dtype!r}; use --kv-cache-dtype auto")
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
    content = [index for index, plan in plans.items() if plan.needs_tokens]
    if content:
        reasons.append(f"rules of layers {content} look at content: vLLM hands its backends no token ids")
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
