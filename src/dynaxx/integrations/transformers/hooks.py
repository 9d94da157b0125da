# SPDX-License-Identifier: Apache-2.0
"""The hooks on a decoder that start and end its passes.

The first adds a `ForwardContext` to the keyword arguments, and transformers passes it to every attention call, even if
a checkpointed layer is recomputed in the backward pass. The second ends the pass.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import nn

from dynaxx.derivatives import is_exporting
from dynaxx.integrations.transformers.decoder import cache_of
from dynaxx.integrations.transformers.forward_context import ARGUMENT, ForwardContext
from dynaxx.integrations.transformers.passes import Passes

logger = logging.getLogger("dynaxx")


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
    """The hooks on a decoder that create a `ForwardContext` for each pass, from `register()` to `remove()`.

    They are registered when the layers' attention is dynaxx's. Passes without their context run dense, so a pass that
    another thread runs at that time is dense or sparse as a whole.

    Args:
        body: the decoder.
        passes: starts and ends its passes.
        again: returns a function that applies the same to a copy of the decoder in another process; see `_spawned`.
    """

    def __init__(self, body: nn.Module, passes: Passes, again: Callable[[], Callable[[nn.Module], Any]]) -> None:
        self.passes, self.again = passes, again
        self.arguments = DecoderArguments.of(body)
        self._hooks: list[Any] = []
        passes.announced = bool(self.arguments.rest)  # otherwise layers call `Passes.unseen`

    def register(self, body: nn.Module) -> None:
        """Announce the passes that start from now on."""
        if self.passes.announced:
            _HOOKS[body] = self
            ForkingPickler.register(_StartHook, _spawned)
            self._hooks = [
                body.register_forward_hook(_Hook(_end, self), with_kwargs=True, always_call=True),
                body.register_forward_pre_hook(_StartHook(_start, self), with_kwargs=True),
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
    passes, entered = hooks.passes, False
    try:
        entered = passes.running.enter()
        if not entered:
            return None
        arguments = hooks.arguments.by_name(args, kwargs)
        current = passes.start_pass(arguments)
    except Exception:  # the layers call the model's original attention instead
        logger.warning("a forward pass could not be prepared", exc_info=True)
        if entered:
            passes.running.leave()
        return None
    current.arguments, current.counts_at_end = arguments, True
    return args, {**kwargs, ARGUMENT: current}


def _end(hooks: PassHooks, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    done = kwargs.get(ARGUMENT)
    if done is None:
        return
    found = output if isinstance(output, tuple) else (cache_of(output),)
    cache = next((each for each in found if hasattr(each, "get_seq_length")), None)
    try:
        hooks.passes.running.leave()
        arguments, done.arguments = done.arguments, {}
        if output is not None:  # otherwise the pass failed
            hooks.passes.end_pass(done, arguments, output, cache)
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
