# SPDX-License-Identifier: Apache-2.0
"""`Handle`: a policy in a model, as its user sees it: counts, requests, the kill switch, replacement, removal."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

from dynaxx.forks import new_lock
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.integrations.runtime.statistics_file import StatisticsFile
from dynaxx.integrations.transformers.batching import continuous_batching
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.interface import LAYERS, name_before
from dynaxx.integrations.transformers.calls.layer import Layer
from dynaxx.integrations.transformers.compiled import ATTRIBUTE, forget, remember
from dynaxx.integrations.transformers.decoder import NAME, ORIGINALS, Decoder, implementation, window_of
from dynaxx.integrations.transformers.hooks import PassHooks, refuse_recomputation
from dynaxx.integrations.transformers.passes import Passes, Watcher
from dynaxx.policy import KILL_SWITCH, KillSwitch, LayerPlan, Policy, PolicyFollower, Profile, request
from dynaxx.policy.drift import HeadDrift
from dynaxx.telemetry import recorder
from dynaxx.telemetry.samples import CacheMeter

logger = logging.getLogger("dynaxx")

CHANGES = new_lock()  # held while a handle enters or leaves a model, so that other threads find all of it or nothing


class Handle(AbstractContextManager["Handle"]):
    """A policy in a model. Also a context manager that removes the policy.

    Attributes:
        counts: the outcomes of layer calls.
        passes: the forward passes of the model, with the policy in force.
        before: the model's original attention, "sdpa" or "eager".
        hooks: the hooks on its decoder.
        kill_switch: the switch of this model; `engage()` makes everything dense from the next pass on. The switch of
            the process, `dynaxx.policy.KILL_SWITCH`, engages it as well.
        watchers: see `watch`.
        background: the thread that measures samples. If it is `patient`, every sample is recorded and requests wait.
        faults: functions called with the layer before each sparse call; their exceptions count as kernel failures. For
            tests.
    """

    def __init__(
        self,
        policy: Policy,
        decoder: Decoder,
        name: str = "",
        *,
        own_pattern: bool = True,
        window: tuple[int, int] | None = None,
        apply: Callable[..., Any],
    ) -> None:
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self._decoder = decoder.weak()  # weak, since the registry of layers must not keep a model alive
        self._numbers = recorder().bind(model_name=name or decoder.name)
        self._policy_events = PolicyEvents(self._numbers)
        self.counts = Counts(self._numbers)
        self.background = Background(partial(self._numbers.failed, "guard"))
        self._own_pattern, self._window, self._name, self._apply = own_pattern, window, name, apply
        self._head_share = decoder.head_share
        self.before = name_before(next(iter(decoder.layers.values())))
        deployed = self._ready(policy, None)
        self.passes = Passes(decoder, deployed, self.kill_switch, self.counts, self._policy_events, self.background)
        self.watchers, self.faults = self.passes.watchers, self.passes.faults
        self._deploying, self._removed = new_lock(), False
        self._follower: PolicyFollower | None = None
        self._statistics: StatisticsFile | None = None
        self._cache_meter = CacheMeter(self._numbers, self.passes.requests.keys)
        originals = {
            (type(m), local): DenseAttention(m, self.before, None if local else window)
            for m in decoder.layers.values()
            for local in [window_of(m)]
        }
        self._names = [(config, self.before if name == NAME else name) for config, name in decoder.implementations()]
        self._layers = weakref.WeakKeyDictionary(
            {m: Layer(self.passes, index, originals[type(m), window_of(m)]) for index, m in decoder.layers.items()}
        )
        for module in (decoder.owner, *decoder.layers.values()):
            ORIGINALS.put(module.config, self.before)
        for module, layer in self._layers.items():
            remember(layer, module)
        LAYERS.update(self._layers)
        self._tell_compilers()
        self.hooks = PassHooks(decoder.body, self.passes, self._again)
        self._policy_events.in_force(deployed)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because a handle belongs to one model object in one process."""
        raise TypeError(
            "a handle cannot be copied or pickled: copy or pickle the model, and call dynaxx.apply on the result with "
            "handle.policy"
        )

    def _again(self) -> Callable[[Any], Any]:
        """Return a function that applies the same to a copy of the model in another process."""
        policy = self.policy if self.policy.rules or not self._own_pattern else None
        options = {"own_pattern": self._own_pattern, "window": self._window, "name": self._name}
        return partial(self._apply, policy=policy, **options)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.passes.deployed.policy

    @property
    def plans(self) -> dict[int, LayerPlan]:
        """The prefill rules by layer. Other layers are dense."""
        return self.passes.deployed.plans

    @property
    def active(self) -> bool:
        """Return whether the policy is still applied."""
        return any(LAYERS.get(m) is layer and implementation(m) == NAME for m, layer in self._layers.items())

    @property
    def attached(self) -> bool:
        """Return whether the policy has not been removed. Its model may use another attention meanwhile."""
        return any(LAYERS.get(module) is layer for module, layer in self._layers.items())

    def replace(self, policy: Policy) -> bool:
        """Put another policy in force for passes that start from now on. Running passes keep theirs.

        Returns:
            Whether it differs from the policy in force.

        Raises:
            PolicyError: see `apply`; the old policy stays in force.
            UnsupportedInputError: see `apply`; the old policy stays in force.
        """
        with self._deploying:
            if policy == self.policy:
                self._policy_events.unchanged()
                return False
            decoder = self._decoder()
            if decoder is None:
                return False
            decoder.check(policy)
            self.passes.deploy(self._ready(policy, self.passes.deployed))
            self._tell_compilers()
        self._policy_events.reloaded(self.passes.deployed)
        return True

    def shard(self, rank: int, ranks: int) -> None:
        """Follow the rules of one of `ranks` equal shares of the q heads from now on, where calls bring these alone.

        Raises:
            ValueError: heads that do not divide.
        """
        with self._deploying:
            self._head_share = (rank, ranks)
            self.passes.deploy(self._ready(self.policy, None))
            self._tell_compilers()

    def follow(self, path: str | os.PathLike[str], *, interval: float = 1.0) -> PolicyFollower:
        """Follow a policy file: a daemon thread checks it every `interval` seconds and applies changes.

        A file that is invalid, for another model, or missing changes nothing, and is logged and counted once.
        """
        if self._follower is not None:
            self._follower.stop()
        self._follower = PolicyFollower(path, self.replace, self._policy_events.refused, interval=interval)
        self._follower.check()
        self._follower.start()
        return self._follower

    def request(self, *ids: str, sparse: bool | None = None) -> AbstractContextManager[None]:
        """Declare the requests that run within the block: `with handle.request("id"):`. See `dynaxx.policy.request`."""
        return request(*ids, sparse=sparse)

    def continuous_batching(self) -> AbstractContextManager[None]:
        """Let transformers' continuous batching serve the model: `with handle.continuous_batching():`.

        Prompts and their chunks follow the prefill rules, later tokens the decode rules. On CUDA, pass
        `ContinuousBatchingConfig(auto_switch_to_flash=False, use_cuda_graph=False)`, because captured steps run dense.

        Raises:
            UnsupportedInputError: the policy has rules by content or a rollout to a share of the requests, or
                transformers is too old.
            RuntimeError: the policy was removed.
        """
        decoder = self._decoder()
        if decoder is None or not self.attached:
            raise RuntimeError("the policy was removed from this model; apply it again")
        return continuous_batching(self.passes, decoder.owner)

    def _ready(self, policy: Policy, before: Deployed | None) -> Deployed:
        if self._head_share[1] > 1 and policy.guard is not None:
            logger.warning("the policy's guard measures nothing under tensor parallelism: it compares whole layers")
        return Deployed(
            policy,
            self._numbers,
            self.background,
            before,
            own_pattern=self._own_pattern,
            window=self._window,
            head_share=self._head_share,
        )

    def _tell_compilers(self) -> None:
        """Update what traced code has read of the policy; code for which it has changed is compiled again."""
        for module, layer in self._layers.items():
            getattr(module, ATTRIBUTE).know(self.passes.deployed, layer.index)

    def drift(self) -> list[HeadDrift]:
        """Return the heads whose attention has drifted from the policy's reference, worst first."""
        guard = self.passes.deployed.guard
        return [] if guard is None else guard.drift()

    def statistics(self, command: str = "") -> Profile | None:
        """Return the profile recorded since this policy came into force, or None before the first measurement."""
        guard = self.passes.deployed.guard
        return None if guard is None else guard.statistics(command)

    def record(self, path: str | os.PathLike[str], *, interval: float = 60.0) -> None:
        """Write the statistics to a file every `interval` seconds, and when the policy is removed.

        `dynaxx retune` reads this file. A daemon thread writes it; a failed write is counted and logged once.
        """
        if self._statistics is not None:
            self._statistics.stop()
        self._statistics = StatisticsFile(path, self.statistics, self._numbers, interval)

    def wait(self) -> None:
        """Wait until all samples are measured."""
        self.background.drain()

    def stats(self) -> dict[str, Any]:
        """Count layer calls since `apply` or `reset_stats`.

        Returns:
            "sparse_calls": calls with at least one sequence that ran by a rule. "own_pattern_calls": calls that ran the
            model's own pattern on dynaxx's kernels. "dense_calls": the others, by reason. "dense_sequences": sequences
            that ran dense in a call with sparse sequences, by reason.
        """
        return self.counts.to_dict()

    def remove(self) -> None:
        """Restore the model's original attention when the passes that run have ended. Further calls do nothing.

        Passes keep their policy to their end, so this waits for those of other threads. A layer that gradient
        checkpointing runs again after the removal raises, because its attention would differ from the forward pass.

        Raises:
            RuntimeError: called within a forward pass of the model.
        """
        with self.passes.running.closed():
            self._stop()
            with CHANGES:
                if not self._removed:  # otherwise the model may have another handle by now
                    self._removed = True
                    self._leave()

    def _leave(self) -> None:
        """Take the layers and hooks of this handle out of the model, and restore its attention."""
        decoder = self._decoder()
        for module in self._layers:
            LAYERS.pop(module, None)
            forget(module)
        self.hooks.remove()
        if decoder is not None:
            self._restore(decoder)
            refuse_recomputation(self._layers, self.passes.recorded)

    def _stop(self) -> None:
        """Stop the threads of the handle, and write its numbers."""
        if self._follower is not None:
            self._follower.stop()
        if self._statistics is not None:
            self._statistics.stop()
        self.background.stop()
        if self.attached:
            self._policy_events.removed()

    def _restore(self, decoder: Decoder) -> None:
        """Give each config of the model the name that it had before `apply`, also configs of copied layers."""
        shared = {id(module.config) for module in LAYERS}  # another model's handle may share a config object
        named = [config for config, name in decoder.implementations() if name == NAME and id(config) not in shared]
        before = {id(config): name for config, name in self._names}
        for config in named:
            config._attn_implementation = before.get(id(config), self.before)
        for module in decoder.owner.modules():
            if module not in LAYERS:
                forget(module)

    def reset_stats(self) -> None:
        """Reset the counts, and the state of the length border."""
        self.counts.reset()
        self.passes.deployed.reset()

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Call `watcher(layer, layout)` for every layout that runs within the block, to measure density or recall."""
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    def __exit__(self, *_: object) -> None:
        """Remove the policy from the model."""
        self.remove()

    def __repr__(self) -> str:
        """Return the model, the number of sparse layers, and whether the handle is active."""
        facts = self.policy.model
        state = "active" if self.active else "removed"
        if not self.policy.rules:
            return f"<dynaxx on {facts.model_type}: its own attention in {facts.layers} layers, {state}>"
        return f"<dynaxx policy on {facts.model_type}: {len(self.plans)} of {facts.layers} layers sparse, {state}>"
