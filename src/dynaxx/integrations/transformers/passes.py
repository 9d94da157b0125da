# SPDX-License-Identifier: Apache-2.0
"""`Passes`: the forward passes of a model under a handle. It starts and ends them, and keeps what later passes need."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from dynaxx.forks import in_child, new_event, new_lock
from dynaxx.integrations.runtime.background import Background
from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.identity import ByIdentity
from dynaxx.integrations.runtime.policy_events import PolicyEvents
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.batches.decode import BatchMemory
from dynaxx.integrations.transformers.calls.decode import CacheMemory
from dynaxx.integrations.transformers.decoder import NAME, Decoder
from dynaxx.integrations.transformers.forward_context import UNKNOWN, ForwardContext, RequestTokens, TokenReader
from dynaxx.integrations.transformers.next_token import COMPARISON, compare_later, comparing
from dynaxx.layout import BlockLayout
from dynaxx.policy import KillSwitch
from dynaxx.policy.rollout import ALL, ChosenRequests, DeclaredRequests, choose, current_request

logger = logging.getLogger("dynaxx")

Watcher = Callable[[int, BlockLayout], None]


class Running:
    """The threads in which passes run, so that a policy is removed between passes.

    Attributes:
        is_open: whether the policy is not removed.
    """

    def __init__(self, body: nn.Module) -> None:
        self._lock, self._ended, self._removed = new_lock(), new_event(), new_event()
        self._passes: dict[int, list[FrameType]] = {}  # the frames of running or interrupted passes by thread
        self.is_open, self._is_closing = True, False
        self._body = weakref.ref(body)
        in_child(self, Running._continue_after_fork)

    def enter(self) -> bool:
        """Begin a pass, after a removal that is under way. Return False if the policy is removed."""
        thread, frame = threading.get_ident(), self._frame_of_pass()
        while True:
            with self._lock:
                runs = any(map(_runs, self._passes.get(thread, ())))
                if runs or not self._is_closing or comparing():  # a removal ends comparisons itself
                    if self.is_open:
                        self._passes[thread] = [*(self._passes[thread] if runs else ()), frame]
                    return self.is_open
            self._removed.wait()

    def leave(self) -> None:
        """End a pass of this thread."""
        thread = threading.get_ident()
        with self._lock:
            frames = self._passes.pop(thread, [])[:-1]
            if frames:
                self._passes[thread] = frames
        self._ended.set()

    def here(self) -> bool:
        """Return whether a pass of this thread runs."""
        return threading.get_ident() in self._passes

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Wait until no pass runs, and let none start within the block. Passes that start later run without a policy.

        Raises:
            RuntimeError: a pass of this thread runs.
        """
        with self._lock:
            if threading.get_ident() in self._inside():
                raise RuntimeError("`remove` must be called between forward passes of the model, not within one")
            self._is_closing = True
        while self._any_inside():
            self._ended.wait(1.0)
        try:
            yield
        finally:
            with self._lock:
                self.is_open = self._is_closing = False
                self._passes.clear()
            self._removed.set()

    def _any_inside(self) -> bool:
        with self._lock:
            self._ended.clear()
            return bool(self._inside())

    def _continue_after_fork(self) -> None:
        """Forget, in a forked child, the passes and the removal of the parent's other threads."""
        thread = threading.get_ident()
        self._passes = {thread: self._passes[thread]} if thread in self._passes else {}
        self._is_closing = False

    def _inside(self) -> set[int]:
        """Return the threads that run a pass, without those whose pass was interrupted."""
        return {thread for thread, frames in self._passes.items() if any(map(_runs, frames))}

    def _frame_of_pass(self) -> FrameType:
        """Return the frame of this thread that calls the body and its hooks."""
        body, frame = self._body(), sys._getframe(1)
        while frame.f_back is not None and frame.f_locals.get("self") is not body:
            frame = frame.f_back
        return frame


def _runs(frame: FrameType) -> bool:
    """Return whether a frame of any thread still runs. To walk another thread's frames may crash the process."""
    try:
        frame.clear()
    except RuntimeError:  # it runs
        return True
    return False


class Passes:
    """The forward passes of a model, which `hooks` starts and ends: their policy, counts, and what later passes need.

    Args:
        decoder: the model, weakly referenced.
        deployed: the policy in force.
        kill_switch: the switch of the model.
        counts: the counts of its calls.
        policy_events: reports when the kill switch is engaged.
        background: the thread that compares requests with the dense model.

    Attributes:
        deployed: the policy in force for passes that start from now on; see `deploy`.
        requests: the policy and the choice of each request that is alive, by its cache.
        tokens: reads token ids, if a rule by content needs them.
        running: the threads in which passes run.
        announced: whether hooks announce passes to this object.
        batches: summaries of the pages of continuous batching, by allocator.
        batching: number of open `with handle.continuous_batching()` blocks.
        watchers: see `Handle.watch`.
        faults: see `Handle`.
        recorded: contexts of passes with gradients, while checkpointed layers may run again with them.
    """

    def __init__(
        self,
        decoder: Decoder,
        deployed: Deployed,
        kill_switch: KillSwitch,
        counts: Counts,
        policy_events: PolicyEvents,
        background: Background,
    ) -> None:
        configs: list[Any] = [module.config for module in decoder.layers.values()]
        self._decoder, self._config = decoder.weak(), weakref.ref(configs[0])
        self._configs = [config for config, _ in decoder.implementations()]
        self.running, self.announced, self._drops_argument = Running(decoder.body), False, False
        self.recorded: weakref.WeakSet[ForwardContext] = weakref.WeakSet()
        self._kill_switch, self.counts, self._policy_events = kill_switch, counts, policy_events
        self._background = background
        self.requests: ByIdentity[tuple[Deployed, ChosenRequests]] = ByIdentity()
        self.tokens: TokenReader | None = None
        self._memories: ByIdentity[CacheMemory] = ByIdentity()
        self.batches: weakref.WeakKeyDictionary[Any, BatchMemory] = weakref.WeakKeyDictionary()
        self.batching = 0
        self.faults: list[Callable[[int], None]] = []
        self.watchers: list[Watcher] = []
        self._unnamed = itertools.count()
        self._warned_replaced = False
        self._of_thread = threading.local()  # the pass of each thread, if the decoder drops the keyword argument
        self.deploy(deployed)

    def deploy(self, deployed: Deployed) -> None:
        """Put a policy in force for passes that start from now on. Running passes keep theirs."""
        self.deployed = deployed
        if self.tokens is None and any(plan.needs_tokens for plan in deployed.plans.values()):
            self.tokens = TokenReader()

    def start_pass(self, arguments: dict[str, Any]) -> ForwardContext:
        """Create the context of a forward pass, from the decoder's arguments by name."""
        self._watch_implementation()
        if comparing():
            return self._context(self.deployed, choice=COMPARISON)
        killed, cache = self._is_killed(), arguments.get("past_key_values")
        deployed, choice = self._route_of_requests(cache)
        tokens = UNKNOWN if self.tokens is None else self.tokens.read(arguments)
        current = self._context(deployed, tokens, choice, killed=killed)
        if arguments.get("output_attentions") or arguments.get("kwargs", {}).get("output_attentions"):
            current.wants_weights = True  # not all decoders hand it down to their attention
        if deployed.decode and hasattr(cache, "get_seq_length"):
            current.memory = self._memories.setdefault(cache, CacheMemory)
            current.memory.start_pass(cache)
        count, device = _prompt_tokens(arguments)
        if count and device is not None:
            current.timer = self.counts.probe.request("dense", count, device)
        return current

    def _context(
        self,
        deployed: Deployed,
        tokens: RequestTokens = UNKNOWN,
        choice: ChosenRequests = ALL,
        *,
        killed: bool = False,
    ) -> ForwardContext:
        current = ForwardContext(deployed, tokens, choice, DenseReason.KILLED if killed else None)
        current.wants_weights = any(getattr(config, "output_attentions", False) for config in self._configs)
        if torch.is_grad_enabled():
            self.recorded.add(current)
        return current

    def _route_of_requests(self, cache: Any) -> tuple[Deployed, ChosenRequests]:
        """Return policy and choice of a pass: those of earlier passes over the cache, unless requests are declared."""
        declared, before = current_request(), self.requests.get(cache) if cache is not None else None
        if before is None or (declared is not None and declared.sparse is not None):
            return self.deployed, self._choose(declared)
        is_default = before[0] is self.deployed and before[1] is ALL
        if not is_default and int(cache.get_seq_length()) == 0:  # a new request starts in it
            return self.deployed, self._choose(declared)
        return before

    def end_pass(self, done: ForwardContext, arguments: dict[str, Any], output: Any, cache: Any) -> None:
        """Store the state that later passes over `cache` need."""
        done.count(self.counts)
        if done.choice is COMPARISON:
            return
        if cache is not None:
            self.requests.put(cache, (done.deployed, done.choice))
            if self.tokens is not None:
                self.tokens.remember(cache, done.tokens)
        if done.timer is not None:
            done.timer.done(route="sparse" if done.ran_sparse else "dense")
        guard = done.deployed.guard
        if guard is not None and done.timer is not None and done.ran_sparse and guard.wants_request():
            compare_later(self._decoder, guard, self._background, arguments, output)

    def unseen(self, layer: int, *, backward: bool = False) -> ForwardContext:
        """Return the current pass of this thread, if the decoder passes none on.

        Layers run in ascending order, and in descending order if a backward pass computes them again.
        """
        before = getattr(self._of_thread, "backward" if backward else "current", None)
        if before is None or (layer >= before[0] if backward else layer <= before[0]):
            current = self._context(self.deployed, choice=self._choose(current_request()), killed=self._is_killed())
            before = (layer, current)
        setattr(self._of_thread, "backward" if backward else "current", (layer, before[1]))
        found: ForwardContext = before[1]
        return found

    def is_outside(self) -> bool:
        """Return whether a call without a context belongs to no pass of this thread that these hooks announced.

        Such a call is one of a layer by itself, or one that a backward pass repeats whose forward pass ran before
        `apply`. Decoders that drop the keyword argument make calls without a context within passes.
        """
        if self.running.here():
            self._drops_argument = True
        return self.announced and not self._drops_argument

    def _watch_implementation(self) -> None:
        """Warn once if the model was given another attention, so that dynaxx does not run."""
        config = self._config()
        name = NAME if config is None else config._attn_implementation
        if name != NAME and not self.batching and not self._warned_replaced:
            self._warned_replaced = True
            logger.warning(
                "the model's attention was set to %r after dynaxx.apply, so nothing runs on dynaxx; "
                "call set_attn_implementation(%r), or remove the handle and apply again",
                str(name),
                NAME,
            )

    def _choose(self, declared: DeclaredRequests | None) -> ChosenRequests:
        rollout, flags = self.deployed.policy.rollout, self.deployed.flags
        return choose(rollout, declared, lambda: next(self._unnamed), flags)

    def _is_killed(self) -> bool:
        return self._policy_events.killed(self._kill_switch.engaged())


def _prompt_tokens(arguments: dict[str, Any]) -> tuple[int, torch.device | None]:
    """Return the number of prompt tokens of a pass (0 for decoding and continuous batching), and its device."""
    if "write_index" in arguments.get("kwargs", {}):
        return 0, None
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    if given is None or given.ndim < 2 or given.shape[1] < 2:
        return 0, None
    return given.shape[0] * given.shape[1], given.device
