"""The tokens of a request, for rules that look at content: from the decoder's own arguments to its attention layers.

Two hooks on the decoder, torch's own: one adds the tokens to the keyword arguments, which transformers hands down to
every attention call, also when a checkpointed layer runs again in a backward pass; the other remembers them beside the
cache that the pass filled, for the next chunk of the prompt.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from dynaxx.integrations.masks import Run
from dynaxx.policy import LayerPlan

ARGUMENT = "dynaxx_tokens"  # the keyword under which attention calls get them


class RequestTokens:
    """The token ids behind the keys of one forward pass, those in the cache included.

    Attributes:
        ids: (batch, seqlen_k) int64, column j is the token of key j; None where they are not known.
        reason: why they are not known, "" if they are.
        reorderable: whether a beam search may have permuted the rows since.
    """

    def __init__(self, ids: Tensor | None, reason: str = "", *, reorderable: bool = False) -> None:
        self.ids = ids
        self.reason = reason
        self.reorderable = reorderable
        self._host: Tensor | None = None
        self._plans: dict[tuple[LayerPlan, int, int, int], LayerPlan] = {}

    def without_plans(self) -> RequestTokens:
        """The tokens alone, to be kept as long as a cache."""
        return RequestTokens(self.ids, self.reason, reorderable=self.reorderable)

    def missing(self, batch: int, seqlen_k: int, runs: list[list[Run]]) -> str:
        """Why these runs cannot be resolved; "" if they can."""
        if self.ids is None:
            return self.reason
        last = max((run.k_stop for entry in runs for run in entry), default=0)
        known = self.ids.shape[0] == batch and last <= self.ids.shape[1] <= seqlen_k
        return "" if known else "token ids of other lengths"

    def resolve(self, plan: LayerPlan, entry: int, run: Run) -> LayerPlan:
        """The plan for one sequence of batch entry `entry`; equal plans of a pass are resolved once."""
        assert self.ids is not None, "`missing` was asked before"
        key = (plan, entry, run.k_start, run.k_stop)
        if key not in self._plans:
            self._host = self.ids.cpu() if self._host is None else self._host
            self._plans[key] = plan.resolve(self._host[entry, run.k_start : run.k_stop])
        return self._plans[key]


UNKNOWN = RequestTokens(None, "no token ids")
EARLIER_UNKNOWN = RequestTokens(None, "token ids of earlier chunks unknown")


class TokenReader:
    """Hooks on a decoder that hand its layers the tokens; `remove()` takes them off."""

    def __init__(self, body: nn.Module) -> None:
        self._signature = inspect.signature(body.forward)
        parameters = self._signature.parameters.values()
        self.caches: weakref.WeakKeyDictionary[Any, RequestTokens] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):  # else: counted as unknown
            _READERS[body] = self
            self._hooks = [
                body.register_forward_pre_hook(_add_tokens, with_kwargs=True),
                body.register_forward_hook(_remember, with_kwargs=True),
            ]

    def remove(self) -> None:
        """Take the hooks off. More calls do nothing."""
        while self._hooks:
            self._hooks.pop().remove()

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RequestTokens:
        """The tokens of a pass that is about to run."""
        given = self._signature.bind_partial(*args, **kwargs).arguments
        new, cache = given.get("input_ids"), given.get("past_key_values")
        if new is None or new.ndim != 2:
            return UNKNOWN
        past = 0 if cache is None else int(cache.get_seq_length())
        if past == 0:
            return RequestTokens(new.detach().clone())
        before = self.caches.get(cache)
        if before is None or before.ids is None or before.ids.shape[1] < past or before.ids.shape[0] != new.shape[0]:
            return EARLIER_UNKNOWN
        one_token = new.shape[1] == 1
        if before.reorderable and not one_token:
            return EARLIER_UNKNOWN
        # A cache that was cropped knows fewer tokens than we do. Beam search permutes rows between single tokens.
        ids = torch.cat([before.ids[:, :past], new.to(before.ids.device)], dim=1)
        return RequestTokens(ids, reorderable=before.reorderable or (one_token and new.shape[0] > 1))


_READERS: weakref.WeakKeyDictionary[nn.Module, TokenReader] = weakref.WeakKeyDictionary()


def _add_tokens(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():  # compiled models run dense
        return None
    reader = _READERS.get(body)
    if reader is None:  # a copy of a model with a policy
        return None
    return args, {**kwargs, ARGUMENT: reader.read(args, kwargs)}


def _remember(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    reader, tokens = _READERS.get(body), kwargs.get(ARGUMENT)
    if reader is None or tokens is None:
        return
    found = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
    for cache in found:
        if hasattr(cache, "get_seq_length"):
            reader.caches[cache] = tokens.without_plans()
