# SPDX-License-Identifier: Apache-2.0
"""`Handle`: the life cycle of a policy in a model. It starts and counts passes, and replaces or removes the policy."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.identity import ByIdentity
from dynaxx.integrations.runtime.next_token import COMPARISON, compare_later, comparing
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.integrations.runtime.statistics_file import StatisticsFile
from dynaxx.integrations.transformers.batches.decode import BatchMemories
from dynaxx.integrations.transformers.batching import continuous_batching, is_open
from dynaxx.integrations.transformers.calls.decode import CacheMemories
from dynaxx.integrations.transformers.calls.dense_fallback import DenseAttention
from dynaxx.integrations.transformers.calls.interface import LAYERS
from dynaxx.integrations.transformers.calls.layer import Layer
from dynaxx.integrations.transformers.calls.planning import is_dense_pass
from dynaxx.integrations.transformers.decoder import NAME, Decoder, implementation
from dynaxx.integrations.transformers.forward_context import ForwardContext, PassHooks, prompt_tokens
from dynaxx.integrations.transformers.masks.lazy import IMPLEMENTATIONS
from dynaxx.integrations.transformers.repeats.dense_passes import DensePass, DensePasses, dense_pass
from dynaxx.integrations.transformers.request import UNKNOWN, TokenReader
from dynaxx.layout import BlockLayout
from dynaxx.policy import KILL_SWITCH, KillSwitch, LayerPlan, Policy, PolicyFollower, Profile, request
from dynaxx.policy.drift import HeadDrift
from dynaxx.policy.rollout import ALL, ChosenRequests, DeclaredRequests, choose, current_request
from dynaxx.telemetry import recorder
from dynaxx.telemetry.caches import CacheMeter

logger = logging.getLogger("dynaxx")

Watcher = Callable[[int, BlockLayout], None]


class Handle:
    """A policy in a model. Also a context manager that removes the policy.

    Attributes:
        counts: the outcomes of layer calls.
        before: the model's original attention, "sdpa" or "eager".
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
    ) -> None:
        self.kill_switch = KillSwitch(KILL_SWITCH)
        self.watchers: list[Watcher] = []
        self.faults: list[Callable[[int], None]] = []
        self._decoder = decoder.weak()  # weak, since the registry of layers must not keep a model alive
        self._numbers = recorder().bind(model_name=name or decoder.name)
        self._policy_events = PolicyEvents(self._numbers)
        self.counts = Counts(self._numbers)
        self.background = Background(partial(self._numbers.failed, "guard"))
        self._tokens: TokenReader | None = None
        self._own_pattern, self._window = own_pattern, window
        self._head_share = decoder.head_share
        self.before = decoder.implementation
        self._deployed = self._ready(policy, None)
        self._deploying = threading.Lock()
        self._follower: PolicyFollower | None = None
        self._statistics: StatisticsFile | None = None
        self._requests: ByIdentity[tuple[Deployed, ChosenRequests]] = ByIdentity()
        self._memories = CacheMemories()
        self._dense_passes = DensePasses()
        self.batches = BatchMemories()
        self._cache_meter = CacheMeter(self._numbers, self._live_caches)
        self._unnamed = itertools.count()
        self._layers = weakref.WeakKeyDictionary(
            {m: Layer(self, index, m, DenseAttention(m, self.before)) for index, m in decoder.layers.items()}
        )
        self._config: weakref.ref[Any] = weakref.ref(decoder.config)
        self._warned_replaced = False
        for module in (decoder.owner, *decoder.layers.values()):
            IMPLEMENTATIONS[id(module.config)] = self.before
        LAYERS.update(self._layers)
        self._hooks = PassHooks(decoder.body, self)
        self._own = threading.local()  # the pass of each thread, if the decoder drops the keyword argument
        self._policy_events.in_force(self._deployed)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because a handle belongs to one model object in one process."""
        raise TypeError(
            "a handle cannot be copied or pickled: copy or pickle the model, and call dynaxx.apply on the result with "
            "handle.policy"
        )

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._deployed.policy

    @property
    def plans(self) -> dict[int, LayerPlan]:
        """The prefill rules by layer. Other layers are dense."""
        return self._deployed.plans

    @property
    def active(self) -> bool:
        """Return whether the policy is still applied."""
        return any(m in LAYERS and implementation(m) == NAME for m in self._layers)

    @property
    def attached(self) -> bool:
        """Return whether the policy has not been removed. Its model may use another attention meanwhile."""
        return any(module in LAYERS for module in self._layers)

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
            self._deployed = self._ready(policy, self._deployed)
        self._policy_events.reloaded(self._deployed)
        return True

    def shard(self, rank: int, ranks: int) -> None:
        """Follow the rules of one of `ranks` equal shares of the q heads from now on, where calls bring these alone.

        Raises:
            ValueError: heads that do not divide.
        """
        with self._deploying:
            self._head_share = (rank, ranks)
            self._deployed = self._ready(self.policy, None)

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
        return continuous_batching(self, decoder.owner)

    def _ready(self, policy: Policy, before: Deployed | None) -> Deployed:
        if self._head_share[1] > 1 and policy.guard is not None:
            logger.warning("the policy's guard measures nothing under tensor parallelism: it compares whole layers")
        deployed = Deployed(
            policy,
            self._numbers,
            self.background,
            before,
            own_pattern=self._own_pattern,
            window=self._window,
            head_share=self._head_share,
        )
        if self._tokens is None and any(plan.needs_tokens for plan in deployed.plans.values()):
            self._tokens = TokenReader()
        return deployed

    def start_pass(self, arguments: dict[str, Any]) -> ForwardContext:
        """Create the context of a forward pass, from the decoder's arguments by name."""
        self._watch_implementation()
        if comparing():
            return ForwardContext(self._deployed, choice=COMPARISON)
        killed, cache = self._is_killed(), arguments.get("past_key_values")
        said, before = current_request(), self._requests.get(cache) if cache is not None else None
        plain = before is None or (before[0] is self._deployed and before[1] is ALL)
        if before is None or (said is not None and said.sparse is not None) or (not plain and _is_empty(cache)):
            before = self._deployed, self._choose(said)
        deployed, choice = before
        tokens = UNKNOWN if self._tokens is None else self._tokens.read(arguments)
        current = ForwardContext(deployed, tokens, choice, killed=killed)
        if deployed.decode:
            current.memory = self._memories.start_pass(cache)
        count, device = prompt_tokens(arguments)
        current.is_dense, current.dense_pass = self._dense_pass(current, arguments, cache)
        if count and device is not None:
            current.timer = self.counts.probe.request("dense", count, device)
        return current

    def _dense_pass(
        self, current: ForwardContext, arguments: dict[str, Any], cache: Any
    ) -> tuple[bool, DensePass | None]:
        """Return whether a pass is certain to be dense, and its calls, if they are known from an earlier pass."""
        given = arguments.get("input_ids")
        given = arguments.get("inputs_embeds") if given is None else given
        if given is None or given.ndim < 2 or "write_index" in arguments.get("kwargs", {}):
            return False, None
        past, seqlen_q = 0 if cache is None else cache.get_seq_length(), int(given.shape[1])
        if not isinstance(past, int) or (seqlen_q == 1 and current.deployed.steps_repeat):
            return False, None
        known = dense_pass(current, given.device.type, seqlen_q, past)
        return known is not None or is_dense_pass(current, given.device, seqlen_q, past), known

    def dense_again(self, kwargs: dict[str, Any]) -> DensePass | None:
        """Return the calls of a pass that needs no context, from the decoder's keyword arguments; None for others.

        Such a pass is like an earlier one, and neither measured nor declared; no switch is engaged.
        """
        found = None if self._tokens is not None else self._dense_passes.again(kwargs, self._deployed)
        if found is None or self._policy_events.was_killed or self.kill_switch.engaged() is not None:
            return None
        if current_request() is not None or comparing() or self.counts.probe.times_next_request():
            return None
        return found

    def end_dense(self, done: DensePass, cache: Any) -> None:
        """End a pass that `dense_again` began."""
        self.counts.dense_pass(done.outcome, done.calls, done.tokens)
        if cache is not None:
            self._requests.put(cache, (done.deployed, ALL))
        if not done.calls:
            self._watch_implementation()

    def end_pass(self, done: ForwardContext, arguments: dict[str, Any], output: Any, cache: Any) -> None:
        """Store the state that later passes over `cache` need."""
        if done.dense_pass is not None:
            self._dense_passes.keep(done, done.dense_pass, arguments.get("input_ids"), arguments.get("past_key_values"))
        done.count(self.counts)
        self.counts.flush()
        if done.choice is COMPARISON:
            return
        if cache is not None:
            self._requests.put(cache, (done.deployed, done.choice))
            if self._tokens is not None:
                self._tokens.remember(cache, done.tokens)
        if done.timer is not None:
            done.timer.done(route="sparse" if done.ran_sparse else "dense")
        guard = done.deployed.guard
        if guard is not None and done.timer is not None and done.ran_sparse and guard.wants_request():
            compare_later(self._decoder, guard, self.background, arguments, output)

    def _watch_implementation(self) -> None:
        """Warn once if the model was given another attention, so that dynaxx does not run."""
        config = self._config()
        name = NAME if config is None else config._attn_implementation
        if name != NAME and not is_open() and not self._warned_replaced:
            self._warned_replaced = True
            logger.warning(
                "the model's attention was set to %r after dynaxx.apply, so nothing runs on dynaxx; "
                "call set_attn_implementation(%r), or remove the handle and apply again",
                str(name),
                NAME,
            )

    def unseen_pass(self, layer: int) -> ForwardContext:
        """Return the current pass of this thread, if the decoder passes none on. Layers run in ascending order."""
        before = getattr(self._own, "current", None)
        if before is None or layer <= before[0]:
            current = ForwardContext(self._deployed, choice=self._choose(current_request()), killed=self._is_killed())
            before = (layer, current)
        self._own.current = (layer, before[1])
        return before[1]

    def _live_caches(self) -> list[Any]:
        """Return the caches of requests that are still alive."""
        return self._requests.keys()

    def _choose(self, said: DeclaredRequests | None) -> ChosenRequests:
        deployed = self._deployed
        return choose(deployed.policy.rollout, said, lambda: next(self._unnamed), deployed.flags)

    def _is_killed(self) -> bool:
        return self._policy_events.killed(self.kill_switch.engaged())

    def drift(self) -> list[HeadDrift]:
        """Return the heads whose attention has drifted from the policy's reference, worst first."""
        guard = self._deployed.guard
        return [] if guard is None else guard.drift()

    def statistics(self, command: str = "") -> Profile | None:
        """Return the profile recorded since this policy came into force, or None before the first measurement."""
        guard = self._deployed.guard
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
        """Restore the model's original attention. Further calls do nothing."""
        if self._follower is not None:
            self._follower.stop()
        if self._statistics is not None:
            self._statistics.stop()
        self.background.stop()
        self.counts.flush()
        if self.attached:
            self._policy_events.removed()
        configs = {id(module.config) for module in self._layers}
        for module in self._layers:
            LAYERS.pop(module, None)
        self._hooks.remove()
        shared = any(id(module.config) in configs for module in LAYERS)  # two models share one config object
        decoder = self._decoder()
        owner = None if decoder is None else decoder.owner
        if owner is not None and owner.config._attn_implementation == NAME and not shared:
            owner.set_attn_implementation(self.before)

    def reset_stats(self) -> None:
        """Reset the counts, and the state of the length border."""
        self.counts.reset()
        self._deployed.reset()

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Call `watcher(layer, layout)` for every layout that runs within the block, to measure density or recall."""
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    def __enter__(self) -> Handle:
        """Return the handle. The end of the block removes it."""
        return self

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


def _is_empty(cache: Any) -> bool:
    """Return whether a cache is empty, so that a new request starts in it."""
    return cache is not None and int(cache.get_seq_length()) == 0
