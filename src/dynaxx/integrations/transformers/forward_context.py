# SPDX-License-Identifier: Apache-2.0
"""The context of one forward pass: decided once when it starts, and passed to each of its attention calls.

Two torch hooks on the decoder provide it. The first adds a `ForwardContext` to the keyword arguments, and transformers
passes it to every attention call, even if a checkpointed layer is recomputed in the backward pass. The second stores
the decisions with the cache that the pass filled, so that the next chunk of a prompt and its decoding follow them.
Running passes keep their policy if it is replaced, and passes in different threads are independent.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.batches.step import BatchStep
from dynaxx.integrations.transformers.calls.arguments import Signature
from dynaxx.integrations.transformers.calls.decode import CacheMemory
from dynaxx.integrations.transformers.calls.own_pattern import OwnPart
from dynaxx.integrations.transformers.calls.planning import CallPlan
from dynaxx.integrations.transformers.decoder import cache_of, is_exporting
from dynaxx.integrations.transformers.masks.lazy import LazyMask, lazy_mask
from dynaxx.integrations.transformers.masks.runs import MaskRun, causal_runs, read_mask
from dynaxx.integrations.transformers.masks.traced import CausalParts
from dynaxx.integrations.transformers.repeats.dense_calls import DenseCall
from dynaxx.integrations.transformers.repeats.prepared import RepeatedCall, RepeatedStep
from dynaxx.integrations.transformers.request import UNKNOWN, RequestTokens
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import times_written
from dynaxx.policy import LayerPlan
from dynaxx.policy.rollout import ALL, ChosenRequests
from dynaxx.telemetry.probe import RequestTimer

logger = logging.getLogger("dynaxx")

ARGUMENT = "dynaxx_pass"  # the keyword argument of attention calls that carries the context

OwnParts = Sequence[OwnPart] | DenseReason  # the layouts of the model's own pattern, or why there are none
Place = tuple[int, MaskRun | None]  # a sequence of a pass, by batch entry and run


class ForwardContext:
    """The context that all attention calls of one forward pass share.

    Attributes:
        deployed: the policy in force when the pass started.
        tokens: the token ids of its keys, if known.
        choice: the requests of the batch that run sparse.
        blocked: why all calls are dense (the kill switch, or the rollout), or None.
        ran_sparse: whether any call ran sparse.
        timer: the timer of a pass over a prompt.
        memory: the summaries of the pass's cache for decoding; None if no cache is known.
        steps: in continuous batching, the steps by allocator.
        call_plans: plans of calls by signature, so that equal layers are planned once.
        parts: layouts of the model's own pattern, or why there are none, by `Signature.of_pattern`.
        dense_calls: dense calls by reason and phase, which are counted when the pass ends; None afterwards.
        repeats: calls that equal layers make without planning, by signature. Empty for unannounced passes.
        measures_next: whether the next call is measured, because a repeated call was drawn.
        arguments: the decoder's arguments by name, while it runs.
        wants_weights: whether a config asks for attention weights, which only eager attention returns.
    """

    __slots__ = (
        "__weakref__",
        "_compiled_masks",
        "_layouts",
        "_mask",
        "_runs",
        "_version",
        "_visible",
        "arguments",
        "blocked",
        "call_plans",
        "choice",
        "dense_calls",
        "deployed",
        "measures_next",
        "memory",
        "parts",
        "ran_sparse",
        "repeats",
        "steps",
        "timer",
        "tokens",
        "wants_weights",
    )

    def __init__(
        self, deployed: Deployed, tokens: RequestTokens = UNKNOWN, choice: ChosenRequests = ALL, *, killed: bool = False
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
        self.call_plans: dict[Signature, CallPlan] = {}
        self.parts: dict[Signature, OwnParts] = {}
        self.dense_calls: Counter[tuple[DenseReason, str]] | None = None
        self.measures_next = False
        self.repeats: dict[Signature, DenseCall | RepeatedCall | RepeatedStep] = {}
        self.arguments: dict[str, Any] = {}
        self.wants_weights = False
        self._visible: tuple[weakref.ref[Tensor], int, Tensor] | None = None
        self._compiled_masks: dict[Hashable, tuple[CausalParts, LazyMask]] = {}
        self._layouts: dict[tuple[Place, int], tuple[LayerPlan, BlockLayout]] = {}  # by sequence and layer
        self._mask: weakref.ref[Tensor] | None = None
        self._version = -1
        self._runs: list[list[MaskRun]] | None = None

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass at its end. Later ones, as of recomputed layers, count themselves."""
        planned, self.dense_calls = self.dense_calls or Counter(), None
        repeats, self.repeats = self.repeats, {}
        for (reason, phase), calls in planned.items():
            counts.dense(reason, phase, calls)
        for call in repeats.values():
            call.count(counts)

    def know_runs(self, mask: Tensor, runs: list[MaskRun]) -> None:
        """Store the runs of a mask with one batch entry, so that it need not be read."""
        self._mask, self._version = weakref.ref(mask), 0 if mask.is_inference() else mask._version
        self._runs = [runs]

    def layout(self, layer: int, place: Place, plan: LayerPlan) -> BlockLayout | None:
        """Return the layout from another layer's selection for the same sequence, if the policy lets `layer` read it.

        Layers do not read others' selections while gradients are recorded, since a recomputed checkpointed layer must
        choose as before, nor under a plan that the guard has widened.
        """
        source = self.deployed.sources.get(layer)
        if source is None or source.layer == layer or torch.is_grad_enabled():
            return None
        kept = self._layouts.get((place, source.layer))
        if kept is None:
            return None
        chosen_by, layout = kept
        if source.heads is None:
            return layout if chosen_by == plan else None
        nominal = plan is self.deployed.plans[layer] or plan.needs_tokens
        return chosen_by.taken(layout, source.heads) if nominal else None

    def keep(self, layer: int, place: Place, plan: LayerPlan, layout: BlockLayout) -> None:
        """Store the selection of a layer for later layers that read it, and drop those that none reads any more."""
        source = self.deployed.sources.get(layer)
        if source is not None and source.layer == layer:
            last = self.deployed.last_reader
            for key in [key for key in self._layouts if last[key[1]] < layer]:
                del self._layouts[key]
            self._layouts[place, layer] = (plan, layout)

    def lazy_mask(self, parts: CausalParts, q: Tensor, seqlen_k: int) -> LazyMask:
        """Return the mask of a compiled pass from its parts: one for all layers, which find the same parts again."""
        key = (parts.offset, q.shape[0], q.shape[2], seqlen_k, *map(_place_of, parts[:2]))
        found = self._compiled_masks.get(key)
        if found is None:  # the parts are kept, so that nothing else can take their place in memory
            found = self._compiled_masks[key] = parts, lazy_mask(parts, q, seqlen_k)
        return found[1]

    def runs(self, mask: Tensor, batch: int) -> list[list[MaskRun]] | None:
        """Return the runs of each batch entry, or None if the mask has none. A mask is read once for all layers."""
        if isinstance(mask, LazyMask):
            return self._runs_of_lazy(mask, batch)
        version = 0 if mask.is_inference() else mask._version
        if self._mask is None or self._mask() is not mask or version != self._version:
            found = read_mask(mask[:, 0])
            self._runs = found * batch if found is not None and len(found) != batch else found
            self._mask, self._version = weakref.ref(mask), version
        return self._runs

    def _runs_of_lazy(self, mask: LazyMask, batch: int) -> list[list[MaskRun]] | None:
        if self._mask is None or self._mask() is not mask:
            rule, self._mask, self._version, self._runs = mask.rule, weakref.ref(mask), 0, None
            if rule.causal and rule.blocks is None and not mask.is_local:
                self._runs = causal_runs(mask.shape[2], mask.offset, mask.padding, rule.documents, batch)
        return self._runs

    def visible(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask as bools if it adds 0 or hides, and hides no row whole; other masks unchanged.

        A mask is read once for all layers. Numbers that are neither 0 nor the lowest are a bias, and transformers gives
        rows without any key their mean value, which kernels for bool masks do not.
        """
        if mask is None or not mask.is_floating_point():
            return mask
        version = 0 if mask.is_inference() else mask._version
        known = self._visible
        if known is None or known[0]() is not mask or known[1] != version:
            shown = mask == 0
            hides = (shown | (mask <= torch.finfo(mask.dtype).min)).all() & shown.any(-1).all()
            known = self._visible = weakref.ref(mask), version, shown if bool(hides) else mask
        return known[2]


def _place_of(x: Tensor | None) -> Hashable:
    """Return where a tensor is and how often it was written to, for tensors that are kept."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), times_written(x))


class RunningPasses(Protocol):
    """The threads in which passes run, namely `Running`."""

    def enter(self) -> bool:
        """Begin a pass. Return False if the policy is removed."""

    def leave(self) -> None:
        """End a pass."""


class Starter(Protocol):
    """An object that starts and ends the passes of a decoder, namely `Passes`.

    Attributes:
        announced: whether hooks announce passes to it.
    """

    announced: bool

    @property
    def running(self) -> RunningPasses:
        """The threads in which passes run."""

    def start_pass(self, arguments: dict[str, Any]) -> ForwardContext:
        """Begin a pass, from the decoder's arguments by name."""

    def end_pass(self, done: ForwardContext, arguments: dict[str, Any], output: Any, cache: Any) -> None:
        """End a pass. `cache` is the cache that it filled, or None."""


class DecoderArguments(NamedTuple):
    """The parameters of a decoder's forward.

    Attributes:
        names: their names, without that of `**kwargs`.
        rest: the name of `**kwargs`, "" without one.
        is_causal: whether all layers are causal.
    """

    names: tuple[str, ...]
    rest: str
    is_causal: bool

    @classmethod
    def of(cls, body: nn.Module) -> DecoderArguments:
        """Read the signature of a decoder."""
        parameters = inspect.signature(body.forward).parameters
        rest = [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD]
        is_causal = all(getattr(module, "is_causal", True) for module in body.modules())
        return cls(tuple(name for name in parameters if name not in rest), rest[0] if rest else "", is_causal)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the decoder's arguments by name, with its `**kwargs` as a dict under their name.

        The cache is under `past_key_values`, also where transformers calls it `cache`, as it does from 5.24 on.
        """
        found = dict(zip(self.names, args, strict=False))
        others = {}
        for name, value in kwargs.items():
            if name in self.names:
                found[name] = value
            else:
                others[name] = value
        if "cache" in self.names:
            older = others.pop("past_key_values", None)
            newer = found.pop("cache", None)
            found["past_key_values"] = older if newer is None else newer
        return {**found, self.rest: others} if others else found

    def with_padding(
        self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a traced pass with a padding mask of a batch without padding; None if not needed.

        Without a cache and a padding mask, transformers reads packed documents from positions, also from those that the
        model counts itself. In eager mode it then sees that there is one document. A compiler cannot see that, and the
        mask would not be the plain causal one.
        """
        if not self.is_causal or len(args) > 1 or "attention_mask" not in self.names:
            return None
        uses_cache = kwargs.get("use_cache")
        if getattr(body.config, "use_cache", False) if uses_cache is None else uses_cache:
            return None
        if any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", "past_key_values", "cache")):
            return None
        tokens = kwargs.get("inputs_embeds")
        if tokens is None:
            tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is None:
            return None
        return args, {**kwargs, "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)}


class PassHooks:
    """The hooks on a decoder that create a `ForwardContext` for each forward pass. `remove()` removes them.

    Args:
        body: the decoder.
        starter: starts and ends its passes.
        again: returns a function that applies the same to a copy of the decoder in another process; see `_spawned`.
    """

    def __init__(self, body: nn.Module, starter: Starter, again: Callable[[], Callable[[nn.Module], Any]]) -> None:
        self.starter, self.again = starter, again
        self.arguments = DecoderArguments.of(body)
        self._hooks: list[Any] = []
        starter.announced = bool(self.arguments.rest)
        if starter.announced:  # otherwise layers call `Passes.unseen`
            _HOOKS[body] = self
            ForkingPickler.register(_StartHook, _spawned)
            self._hooks = [
                body.register_forward_pre_hook(_StartHook(_start, self), with_kwargs=True),
                body.register_forward_hook(_Hook(_end, self), with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks. Further calls do nothing."""
        while self._hooks:
            self._hooks.pop().remove()


_HOOKS: weakref.WeakKeyDictionary[nn.Module, PassHooks] = weakref.WeakKeyDictionary()


class _Hook:
    """A hook of a decoder. A copy of the decoder shares it; a pickle has a function that does nothing, without dynaxx.

    Args:
        run: called as `run(hooks, decoder, *arguments)`, only for the decoder of `hooks`.
        hooks: all hooks of the decoder.
    """

    def __init__(self, run: Callable[..., Any], hooks: PassHooks) -> None:
        self._run, self.hooks = run, weakref.ref(hooks)

    def __call__(self, body: nn.Module, *given: Any) -> Any:
        if torch.compiler.is_compiling():  # layers of compiled models call `Passes.unseen`
            return None
        hooks = _HOOKS.get(body)
        return None if hooks is None or hooks is not self.hooks() else self._run(hooks, body, *given)

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


class _StartHook(_Hook):
    """The hook that starts passes."""

    def __init__(self, run: Callable[..., Any], hooks: PassHooks) -> None:
        super().__init__(run, hooks)
        self._arguments = hooks.arguments

    def __call__(self, body: nn.Module, *given: Any) -> Any:
        if torch.compiler.is_compiling():
            return None if is_exporting() else self._arguments.with_padding(body, *given)
        return super().__call__(body, *given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        logger.warning(
            "a model with a dynaxx handle is pickled with its original attention, without policy and window; "
            "call dynaxx.apply where it is loaded"
        )
        return super().__reduce__()


class _Spawned:
    """The hook of a decoder that was sent to another process, which applies dynaxx there before the first pass."""

    def __init__(self, apply: Callable[[nn.Module], Any]) -> None:
        self._apply: Callable[[nn.Module], Any] | None = apply

    def __call__(self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        apply, self._apply = self._apply, None
        if apply is None:
            return None
        apply(body)
        return _start(_HOOKS[body], body, args, kwargs) if body in _HOOKS else None


def _spawned(hook: _StartHook) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a hook for multiprocessing, which pickles models only for processes of the same program."""
    hooks = hook.hooks()
    return (_Spawned, (hooks.again(),)) if hooks is not None else _Hook.__reduce__(hook)


def _start(
    hooks: PassHooks, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch._C._get_tracing_state() is not None:
        return None
    starter, entered = hooks.starter, False
    try:
        entered = starter.running.enter()
        if not entered:
            return None
        arguments = hooks.arguments.by_name(args, kwargs)
        current = starter.start_pass(arguments)
    except Exception:  # the layers call the model's original attention instead
        logger.warning("a forward pass could not be prepared", exc_info=True)
        if entered:
            starter.running.leave()
        return None
    current.arguments, current.dense_calls = arguments, Counter()
    return args, {**kwargs, ARGUMENT: current}


def _end(hooks: PassHooks, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    done = kwargs.get(ARGUMENT)
    if done is None:
        return
    found = output if isinstance(output, tuple) else (cache_of(output),)
    cache = next((each for each in found if hasattr(each, "get_seq_length")), None)
    try:
        hooks.starter.running.leave()
        arguments, done.arguments = done.arguments, {}
        if output is not None:  # otherwise the pass failed
            hooks.starter.end_pass(done, arguments, output, cache)
    except Exception:  # the output is complete, so do not fail the request
        logger.warning("the state after a forward pass could not be stored", exc_info=True)


def refuse_recomputation(modules: Iterable[nn.Module], contexts: Iterable[ForwardContext]) -> None:
    """Let checkpointed layers raise that run again with one of these contexts of earlier passes, while it exists."""
    alive = list(contexts)
    hooks = [each.register_forward_pre_hook(_refuse, with_kwargs=True) for each in modules] if alive else []
    left = itertools.count(len(alive) - 1, -1)

    def gone() -> None:
        if next(left) == 0:
            for hook in hooks:
                hook.remove()

    for each in alive:
        weakref.finalize(each, gone).atexit = False


def _refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if ARGUMENT in kwargs:
        raise RuntimeError(
            f"{type(module).__name__} runs again for a backward pass, but its dynaxx handle was removed after the "
            "forward pass; call backward() before remove(), or inside the `with` block"
        )


def prompt_tokens(arguments: dict[str, Any]) -> tuple[int, torch.device | None]:
    """Return the number of prompt tokens of a pass (0 for decoding and continuous batching), and its device."""
    if "write_index" in arguments.get("kwargs", {}):
        return 0, None
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    if given is None or given.ndim < 2 or given.shape[1] < 2:
        return 0, None
    return given.shape[0] * given.shape[1], given.device
