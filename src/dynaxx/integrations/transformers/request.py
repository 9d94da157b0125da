# SPDX-License-Identifier: Apache-2.0
"""The token ids of a request, for rules by content: read when a pass starts, and stored with its cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.identity import ByIdentity
from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.policy import LayerPlan


class RequestTokens:
    """The token ids of the keys of one forward pass, including cached keys.

    Attributes:
        ids: (batch, seqlen_k) int64, column j is the token of key j; None if they are unknown.
        reason: why they are unknown, "" if they are known.
        reorderable: whether beam search may have permuted the rows since.
    """

    def __init__(self, ids: Tensor | None, reason: str = "", *, reorderable: bool = False) -> None:
        self.ids = ids
        self.reason = reason
        self.reorderable = reorderable
        self._host: Tensor | None = None
        self._plans: dict[tuple[LayerPlan, int, int, int], LayerPlan] = {}

    def without_plans(self) -> RequestTokens:
        """Return the tokens without cached plans, to store them with a cache."""
        return RequestTokens(self.ids, self.reason, reorderable=self.reorderable)

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
        self.caches.put(cache, tokens.without_plans())
