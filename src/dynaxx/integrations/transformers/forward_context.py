# SPDX-License-Identifier: Apache-2.0
"""The context of one forward pass: decided once when it starts, and passed to each of its attention calls.

Running passes keep their policy if it is replaced, and passes in different threads are independent.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.counts import Counts
from dynaxx.integrations.runtime.deployed import Deployed
from dynaxx.integrations.runtime.identity import ByIdentity
from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.batches.step import BatchStep
from dynaxx.integrations.transformers.calls.call_plan import CallPlan
from dynaxx.integrations.transformers.calls.decode import CacheMemory
from dynaxx.integrations.transformers.calls.own_pattern import OwnPart
from dynaxx.integrations.transformers.calls.signature import Signature
from dynaxx.integrations.transformers.masks.lazy import CausalParts, LazyMask, lazy_mask
from dynaxx.integrations.transformers.masks.runs import MaskRun, causal_runs, read_mask
from dynaxx.layout.derived import times_written
from dynaxx.policy import LayerPlan
from dynaxx.policy.rollout import ALL, ChosenRequests
from dynaxx.telemetry.probe import RequestTimer


@dataclass(eq=False)
class RequestTokens:
    """The token ids of the keys of one forward pass, including cached keys."""

    ids: Tensor | None  # (batch, seqlen_k) int64, column j is the token of key j; None if they are unknown
    reason: str = ""  # why they are unknown, "" if they are known
    reorderable: bool = False  # whether beam search may have permuted the rows since
    _host: Tensor | None = field(default=None, init=False)
    _plans: dict[tuple[LayerPlan, int, int, int], LayerPlan] = field(default_factory=dict, init=False)

    def missing(self, batch: int, seqlen_k: int, runs: list[list[MaskRun]]) -> str:
        """Return why these runs cannot be resolved, "" if they can."""
        if self.ids is None:
            return self.reason
        last = max((run.k_stop for entry in runs for run in entry), default=0)
        known = self.ids.shape[0] == batch and last <= self.ids.shape[1] <= seqlen_k
        return "" if known else "token ids of other lengths"

    def resolve(self, plan: LayerPlan, entry: int, run: MaskRun) -> LayerPlan:
        """Return the plan for one sequence of a batch entry. Equal plans of a pass are resolved once."""
        assert self.ids is not None, "`missing` must have returned an empty reason"
        key = (plan, entry, run.k_start, run.k_stop)
        if key not in self._plans:
            self._host = self.ids.cpu() if self._host is None else self._host
            self._plans[key] = plan.resolve(self._host[entry, run.k_start : run.k_stop])
        return self._plans[key]


UNKNOWN = RequestTokens(None, "no token ids")
EARLIER_UNKNOWN = RequestTokens(None, "token ids of earlier chunks unknown")


class TokenReader:
    """Find the token ids of each pass, including those of earlier chunks, which are stored per cache."""

    def __init__(self) -> None:
        self.caches: ByIdentity[RequestTokens] = ByIdentity()

    def read(self, arguments: dict[str, Any]) -> RequestTokens:
        """Return the tokens of a pass, from the decoder's arguments by name."""
        new, cache = arguments.get("input_ids"), arguments.get("past_key_values")
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
        # A cropped cache has fewer tokens than were stored. Beam search permutes rows between single tokens.
        ids = torch.cat([before.ids[:, :past], new.to(before.ids.device)], dim=1)
        return RequestTokens(ids, reorderable=before.reorderable or (one_token and new.shape[0] > 1))

    def remember(self, cache: Any, tokens: RequestTokens) -> None:
        """Store the tokens of the keys that are in `cache` now."""
        self.caches.put(cache, replace(tokens))  # without the plans of the pass


ARGUMENT = "dynaxx_pass"  # the keyword argument of attention calls that carries the context

OwnParts = Sequence[OwnPart] | DenseReason  # the layouts of the model's own pattern, or why there are none


@dataclass(slots=True, weakref_slot=True, eq=False)
class ForwardContext:
    """The context that all attention calls of one forward pass share."""

    deployed: Deployed  # the policy in force when the pass started
    tokens: RequestTokens = UNKNOWN  # the token ids of its keys, if known
    choice: ChosenRequests = ALL  # the requests of the batch that run sparse
    blocked: DenseReason | None = None  # why all calls are dense (the kill switch), or None; see `__post_init__`
    ran_sparse: bool = False  # whether any call ran sparse
    timer: RequestTimer | None = None  # the timer of a pass over a prompt
    memory: CacheMemory | None = None  # the summaries of the pass's cache for decoding; None if no cache is known
    steps: dict[int, BatchStep] = field(default_factory=dict)  # in continuous batching, the steps by allocator
    call_plans: dict[Signature, CallPlan] = field(default_factory=dict)  # so that equal layers are planned once
    parts: dict[Signature, OwnParts] = field(default_factory=dict)  # by `Signature.of_pattern`
    counts_at_end: bool = False  # whether a hook will end the pass, which then counts the calls of its plans
    measures_next: bool = False  # whether the next call is measured, because a repeated call was drawn
    arguments: dict[str, Any] = field(default_factory=dict)  # the decoder's arguments by name, while it runs
    wants_weights: bool = False  # whether a config asks for attention weights, which only eager attention returns
    _visible: tuple[weakref.ref[Tensor], int, Tensor] | None = None
    _compiled_masks: dict[Hashable, tuple[CausalParts, LazyMask]] = field(default_factory=dict)
    _mask: weakref.ref[Tensor] | None = None
    _version: int = -1
    _runs: list[list[MaskRun]] | None = None

    def __post_init__(self) -> None:
        """Block the calls of a pass whose requests all run dense."""
        if self.blocked is None and self.choice.nothing:
            self.blocked = DenseReason.of(self.choice.reason)

    def count(self, counts: Counts) -> None:
        """Count the calls of the pass at its end. Later ones, as of recomputed layers, count themselves."""
        self.counts_at_end = False
        for planned in self.call_plans.values():
            planned.repeat = None
            planned.count(counts)

    def know_runs(self, mask: Tensor, runs: list[MaskRun]) -> None:
        """Store the runs of a mask with one batch entry, so that it need not be read."""
        self._mask, self._version = weakref.ref(mask), times_written(mask)
        self._runs = [runs]

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
        version = times_written(mask)
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
        version = times_written(mask)
        known = self._visible
        if known is None or known[0]() is not mask or known[1] != version:
            shown = mask == 0
            hides = (shown | (mask <= torch.finfo(mask.dtype).min)).all() & shown.any(-1).all()
            known = self._visible = weakref.ref(mask), version, shown if bool(hides) else mask
        return known[2]


def _place_of(x: Tensor | None) -> Hashable:
    """Return where a tensor is and how often it was written to, for tensors that are kept."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), times_written(x))
