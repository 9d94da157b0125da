# SPDX-License-Identifier: Apache-2.0
"""The policy of the SGLang process: read, checked against its model runner, resolved for this rank's heads.

This module uses SGLang's objects by field names and does not import SGLang.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from typing_extensions import override

from dynaxx.errors import UnsupportedInputError
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.paged import Softmax
from dynaxx.integrations.runtime.paged_layer import PagedLayer
from dynaxx.integrations.runtime.served import POLICY_VARIABLE, ServedPolicy, policy_path
from dynaxx.policy import ModelFacts, Policy, load_policy
from dynaxx.telemetry import recorder

SERVED_CACHES = ("torch.float16", "torch.bfloat16", "torch.float32")


class Engine(ServedPolicy):
    """The policy in one SGLang process.

    Args:
        path: the policy file.
        runner: SGLang's model runner.
        share: (rank, ranks) of the heads under tensor parallelism.
        decode_graphs: whether SGLang captures decoding in CUDA graphs.

    Attributes:
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
        super().__init__(path, numbers)
        reasons = refusals(policy, runner, share[1])
        if not reasons:
            background = Background(partial(numbers.failed, "guard"))
            self._deployed = Deployed(policy, numbers, background, head_share=share)
            reasons = deployed_refusals(self._deployed, runner, decode_graphs=decode_graphs)
        if reasons:
            raise UnsupportedInputError(f"{path} with {policy.model.model_type}", {"sglang": reasons})
        self._policy_events.in_force(self._deployed)

    @property
    @override
    def deployed(self) -> Deployed:
        return self._deployed

    def layer(self, index: int, softmax: Softmax) -> PagedLayer:
        """Return the object that runs a layer, made at its first call."""
        if index not in self.layers:
            self.layers[index] = PagedLayer(index, softmax, self.counts)
        return self.layers[index]


def refusals(policy: Policy, runner: Any, ranks: int) -> list[str]:
    """Return the reasons why SGLang cannot serve a policy exactly."""
    reasons = []
    if policy.rollout.share != 1.0 or policy.rollout.flag is not None:
        reasons.append("`rollout.share` and `rollout.flag` choose requests by id; set share to 1.0, remove the flag")
    if policy.shares_choices:
        reasons.append("`reuse` and `shared` share a selection between layers; set `reuse` to 1, and remove `shared`")
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
