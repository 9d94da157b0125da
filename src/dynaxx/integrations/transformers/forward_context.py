# SPDX-License-Identifier: Apache-2.0
"""One forward pass: what is decided once when it starts, handed down to every attention call of it.

Two hooks on the decoder, torch's own: one adds a `Pass` to the keyword arguments, which transformers hands down to
every attention call, also when a checkpointed layer runs again in a backward pass; the other tells which cache the pass
filled, so that the next chunk of a prompt and its decoding follow the decisions of the first. A policy that is replaced
while a pass runs changes nothing in it, and passes in several threads do not meet.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.batch_step import BatchStep
from dynaxx.integrations.transformers.decode import CacheMemory
from dynaxx.integrations.transformers.lazy_mask import LazyMask
from dynaxx.integrations.transformers.masks import Run, causal_runs, read_mask
from dynaxx.integrations.transformers.native import Part
from dynaxx.integrations.transformers.planning import Work
from dynaxx.integrations.transformers.request import UNKNOWN, RequestTokens
from dynaxx.layout import BlockLayout
from dynaxx.policy import LayerPlan
from dynaxx.policy.rollout import ALL, Choice
from dynaxx.telemetry.probe import RequestTimer

logger = logging.getLogger("dynaxx")

ARGUMENT = "dynaxx_pass"  # the keyword under which attention calls get it

Parts = Sequence[Part] | DenseReason  # the layouts of the model's own pattern, or why there are none
Place = tuple[int, Run | None]  # a sequence of a pass: its batch entry, and which run of it


class Pass:
    """What holds for all attention calls of one forward pass.

    Attributes:
        deployed: the policy in force when it started.
        tokens: the token ids behind its keys, as far as known.
        choice: which requests of the batch run sparse.
        blocked: why all calls are dense: the kill switch, or the rollout; None if they need not be.
        ran_sparse: whether any call of it did.
        timer: of a pass over a prompt.
        memory: what decoding keeps beside the cache of the pass; None if no cache is known.
        steps: in continuous batching, by the allocator of a layer's cache, what the pass holds.
        works: what calls do, by what they have in common, and the mask; layers with like calls are planned once.
        dense_calls: calls that ran dense, by reason and phase, to be counted when the pass ends; None after it.
        arguments: the decoder's own, by name, while it runs.
    """

    __slots__ = (
        "_layouts",
        "_mask",
        "_parts",
        "_runs",
        "_version",
        "arguments",
        "blocked",
        "choice",
        "dense_calls",
        "deployed",
        "memory",
        "ran_sparse",
        "steps",
        "timer",
        "tokens",
        "works",
    )

    def __init__(
        self, deployed: Deployed, tokens: RequestTokens = UNKNOWN, choice: Choice = ALL, *, killed: bool = False
    ) -> None:
        self.deployed = deployed
        self.tokens = tokens
        self.choice = choice
        self.blocked: DenseReason | None = None
        if killed:
            self.blocked = DenseReason.KILLED
        elif choice.nothing:
            self.blocked = DenseReason.of(choice.reason)
        self.ran_sparse = False
        self.timer: RequestTimer | None = None
        self.memory: CacheMemory | None = None
        self.steps: dict[int, BatchStep] = {}
        self.works: dict[Hashable, tuple[Work, weakref.ref[Tensor] | None]] = {}
        self.dense_calls: Counter[tuple[DenseReason, str]] | None = None
        self.arguments: dict[str, Any] = {}
        self._layouts: dict[Place, tuple[int, LayerPlan, BlockLayout]] = {}
        self._mask: weakref.ref[Tensor] | None = None
        self._parts: dict[Hashable, tuple[Parts, weakref.ref[Tensor] | None]] = {}
        self._version = -1
        self._runs: list[list[Run]] | None = None

    def know_runs(self, mask: Tensor, runs: list[Run]) -> None:
        """Say what the runs of a mask of one batch entry are, so that nobody has to read it."""
        self._mask, self._version = weakref.ref(mask), 0 if mask.is_inference() else mask._version
        self._runs = [runs]

    def layout(self, layer: int, place: Place, plan: LayerPlan) -> BlockLayout | None:
        """Return what another layer chose for the same sequence, where the policy has `layer` use that.

        Not where gradients are recorded: a checkpointed layer that runs again must choose as it did.
        """
        source, kept = self.deployed.sources.get(layer, layer), self._layouts.get(place)
        if source == layer or kept is None or kept[:2] != (source, plan) or torch.is_grad_enabled():
            return None
        return kept[2]

    def keep(self, layer: int, place: Place, plan: LayerPlan, layout: BlockLayout) -> None:
        """Remember a layer's choice for those after it that use it."""
        if self.deployed.sources.get(layer) == layer:
            self._layouts[place] = (layer, plan, layout)

    def runs(self, mask: Tensor, batch: int) -> list[list[Run]] | None:
        """Return the runs of each batch entry, None if the mask has none; layers that share a mask read it once."""
        if isinstance(mask, LazyMask):
            return self._runs_of_lazy(mask, batch)
        version = 0 if mask.is_inference() else mask._version
        if self._mask is None or self._mask() is not mask or version != self._version:
            found = read_mask(mask[:, 0])
            self._runs = found * batch if found is not None and len(found) != batch else found
            self._mask, self._version = weakref.ref(mask), version
        return self._runs

    def _runs_of_lazy(self, mask: LazyMask, batch: int) -> list[list[Run]] | None:
        if self._mask is None or self._mask() is not mask:
            rule, self._mask, self._version, self._runs = mask.rule, weakref.ref(mask), 0, None
            if rule.causal and not mask.is_local:
                seqlen_q, seqlen_k = mask.shape[2:]
                self._runs = causal_runs(seqlen_q, seqlen_k, mask.offset, mask.padding, rule.documents, batch)
        return self._runs

    def native_parts(self, key: Hashable, mask: Tensor | None, make: Callable[[], Parts]) -> Parts:
        """Return the layouts of the model's own pattern; layers that share a mask make them once."""
        known, of_mask = self._parts.get(key, (None, None))
        if known is None or (of_mask is not None and of_mask() is not mask):
            known = make()
            self._parts[key] = known, None if mask is None else weakref.ref(mask)
        return known


class Starter(Protocol):
    """What makes the passes of a decoder; a handle."""

    def start_pass(self, arguments: dict[str, Any]) -> Pass:
        """Begin a pass that is about to run, from the decoder's own arguments by name."""

    def end_pass(self, done: Pass, arguments: dict[str, Any], output: Any, cache: Any) -> None:
        """End a pass that has run; `cache` is what it filled, None if nothing."""


class PassHooks:
    """Hooks on a decoder that give each pass of it a `Pass`; `remove()` takes them off."""

    def __init__(self, body: nn.Module, starter: Starter) -> None:
        self.starter = starter
        parameters = inspect.signature(body.forward).parameters
        rest = [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD]
        self._names = tuple(name for name in parameters if name not in rest)
        self._rest = rest[0] if rest else ""
        self._hooks: list[Any] = []
        if rest:  # else layers ask for themselves
            _HOOKS[body] = self
            self._hooks = [
                body.register_forward_pre_hook(_start, with_kwargs=True),
                body.register_forward_hook(_end, with_kwargs=True),
            ]

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the decoder's own arguments by name, others as a dict under the name that it has for them."""
        found = dict(zip(self._names, args, strict=False))
        others = {}
        for name, value in kwargs.items():
            if name in self._names:
                found[name] = value
            else:
                others[name] = value
        return {**found, self._rest: others} if others else found

    def remove(self) -> None:
        """Take the hooks off. More calls do nothing."""
        while self._hooks:
            self._hooks.pop().remove()


_HOOKS: weakref.WeakKeyDictionary[nn.Module, PassHooks] = weakref.WeakKeyDictionary()


def _start(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():  # compiled models run dense
        return None
    hooks = _HOOKS.get(body)
    if hooks is None:  # a copy of a model with a policy
        return None
    arguments = hooks.arguments(args, kwargs)
    try:
        current = hooks.starter.start_pass(arguments)
    except Exception:  # the layers ask for a pass themselves
        logger.warning("a forward pass could not be prepared; said for each", exc_info=True)
        return None
    current.arguments, current.dense_calls = arguments, Counter()
    return args, {**kwargs, ARGUMENT: current}


def _end(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    hooks, done = _HOOKS.get(body), kwargs.get(ARGUMENT)
    if hooks is None or done is None:
        return
    found = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
    cache = next((each for each in found if hasattr(each, "get_seq_length")), None)
    arguments, done.arguments = done.arguments, {}
    try:
        hooks.starter.end_pass(done, arguments, output, cache)
    except Exception:  # the answer is there
        logger.warning("what a forward pass leaves could not be kept; said for each", exc_info=True)


def prompt_tokens(arguments: dict[str, Any]) -> tuple[int, torch.device | None]:
    """How many tokens of prompts a pass brings, 0 for a step of decoding or of many requests, and where it runs."""
    if "write_index" in arguments.get("kwargs", {}):
        return 0, None
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    if given is None or given.ndim < 2 or given.shape[1] < 2:
        return 0, None
    return given.shape[0] * given.shape[1], given.device
