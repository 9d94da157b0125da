# SPDX-License-Identifier: Apache-2.0
"""Decoding under a policy: attend from a step's queries to the cache of transformers, with summaries of its pages.

A step is a few queries over more keys. The cache stays that of transformers: the tensors of a `DynamicCache` or
`StaticCache` form a contiguous `PagedCache`. Each step updates the summaries as long as the cache keeps its tensors. If
the tensors are replaced (beam search permutes rows, assisted decoding crops), the summaries are rebuilt, which reads
all keys once.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.transformers.masks.runs import MaskRun
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.ops.prepared.step import PreparedStep, StepReplay, prepare_step
from dynaxx.policy.resolve import DecodePlan

MAX_STEPS = 256  # prepared steps of a policy
SPARE_PAGES = 64  # pages by which summaries grow at a time


@dataclass
class _SummarizedLayer:
    """The summaries of one layer of a cache."""

    summaries: PageSummaries
    keys: weakref.ref[Tensor]  # the summarized tensor
    summarized: int  # number of first keys that the summaries cover


class StepRows(NamedTuple):
    """Consecutive rows of a decoding step whose first real key is in the same column, so that they run together."""

    first: int
    last: int
    start: int  # column of the first real key
    stops: tuple[int, ...]  # number of real keys of each row

    @classmethod
    def of(cls, runs: list[MaskRun]) -> list[StepRows]:
        """Group the rows of a step, given the run of each."""
        starts = [run.k_start for run in runs]
        bounds = [0, *(row for row in range(1, len(runs)) if starts[row] != starts[row - 1]), len(runs)]
        return [
            cls(first, last, starts[first], tuple([run.k_stop - starts[first] for run in runs[first:last]]))
            for first, last in pairwise(bounds)
        ]


class StepTaken(NamedTuple):
    """A prepared step that a layer took, which equal layers of the same pass may repeat. Its rows run together."""

    replay: StepReplay
    summarized: int  # number of keys that the summaries covered before the step
    used: int  # and after it
    form: torch.Size  # shape of the summaries


class CacheMemory:
    """The summaries of one transformers cache, by layer. They live as long as the cache.

    Attributes:
        repeated: the last step, if it was a prepared one over all rows.
    """

    def __init__(self) -> None:
        self.repeated: StepTaken | None = None
        self._layers: dict[tuple[int, int], _SummarizedLayer] = {}  # by layer and first row
        self._lengths: dict[tuple[int, ...], Tensor] = {}

    def start_pass(self, cache: Any) -> None:
        """Drop, before a forward pass, the summaries of tensors that were replaced or will be overwritten."""
        self._lengths.clear()
        past = int(cache.get_seq_length())
        layers = getattr(cache, "layers", ())
        for place, memory in list(self._layers.items()):
            index = place[0]
            keys = getattr(layers[index], "keys", None) if index < len(layers) else None
            if keys is None or keys is not memory.keys():
                del self._layers[place]
            else:
                memory.summarized = min(memory.summarized, past)

    def of(self, layer: int, row: int) -> _SummarizedLayer | None:
        """Return the summaries of a layer's rows from `row` on, if there are any."""
        return self._layers.get((layer, row))

    def lengths(self, values: tuple[int, ...], device: torch.device) -> Tensor:
        """Return lengths as a (batch,) int32 tensor. The layers of a pass on one device share it."""
        key = (*values, -1 if device.index is None else device.index)
        found = self._lengths.get(key)
        if found is None:
            if min(values) == max(values):  # a kernel instead of a copy, for which the host would wait
                found = torch.full((len(values),), values[0], dtype=torch.int32, device=device)
            else:
                found = torch.tensor(values, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
            self._lengths[key] = found
        return found

    def with_summaries(
        self, layer: int, keys: Tensor, cache: PagedCache, bound: float, *, row: int, start: int, used: int
    ) -> PagedCache:
        """Return a cache with current summaries.

        Args:
            layer: index of the layer.
            keys: (B, Hk, Lk, D), the tensor of transformers' cache.
            cache: some of its rows, from column `start` on.
            bound: see `PageBudget`.
            row: index of the first row.
            start: column of the first key.
            used: largest number of keys of a sequence.
        """
        memory = self._layers.get((layer, row))
        if memory is not None and memory.summaries.bound == bound and _fits(memory.summaries, cache):
            summaries = memory.summaries
            if summaries.low.shape[1] < cache.max_pages:
                summaries = summaries.grown(cache.max_pages + SPARE_PAGES)
            cache = replace(cache, summaries=summaries)
            known = max(0, memory.summarized - start)
            if used > known:
                cache = summarize_pages(cache, new_tokens=used - known)
        else:
            cache = summarize_pages(cache, bound=bound)
            assert cache.summaries is not None, "just made"
            cache = replace(cache, summaries=cache.summaries.grown(cache.max_pages + SPARE_PAGES))
        assert cache.summaries is not None, "just made"
        self._layers[layer, row] = _SummarizedLayer(cache.summaries, weakref.ref(keys), start + used)
        return cache


class LayerSteps(NamedTuple):
    """The decoding steps of one layer: its rule, the summaries of its cache, and the prepared steps of the policy."""

    layer: int
    kind: int  # equal for layers with equal rules, which share prepared steps
    plan: DecodePlan
    memory: CacheMemory
    prepared: dict[Hashable, PreparedStep]
    scale: float | None
    softcap: float | None
    sinks: Tensor | None

    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[StepRows]) -> Tensor:
        """Attend from q (B, Hq, Lq, D) to the cache's k and v (B, Hk, Lk, D), and return (B, Lq, Hq, D).

        Pages start at the first real key of each row, so that left padding has no influence. Rows with different
        padding run separately.
        """
        outs = []
        for group in rows:
            if group.start == 0 and len(rows) == 1:
                queries, keys, values = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            else:
                own, columns = slice(group.first, group.last), slice(group.start, None)
                queries, keys, values = (x.transpose(1, 2) for x in (q[own], k[own, :, columns], v[own, :, columns]))
            out = self._repeat(queries, keys, values, k, group)
            outs.append(self._attend_group(queries, keys, values, k, group) if out is None else out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_group(self, q: Tensor, k: Tensor, v: Tensor, of_cache: Tensor, rows: StepRows) -> Tensor:
        """Run a step of rows with equal padding, (B, Lq, Hq, D), and prepare it for later steps."""
        budget, lengths = self.plan.budget, self.memory.lengths(rows.stops, q.device)
        cache = PagedCache.contiguous(k, v, page_size=self.plan.page_size, seqused_k=lengths)
        if not budget.reads_everything:
            cache = self.memory.with_summaries(
                self.layer, of_cache, cache, budget.bound, row=rows.first, start=rows.start, used=max(rows.stops)
            )
        out = sparse_decode(q, cache, budget, scale=self.scale, softcap=self.softcap, sinks=self.sinks)
        if not budget.reads_everything:
            self._prepare(q, cache)
        return out

    def _repeat(self, q: Tensor, k: Tensor, v: Tensor, of_cache: Tensor, rows: StepRows) -> Tensor | None:
        """Run a prepared step, (B, Lq, Hq, D); None if there is none, or if the summaries must grow or be rebuilt."""
        memory, known = self.memory, self.memory.of(self.layer, rows.first)
        if known is None:
            return None
        step = self.prepared.get(self._key(q, k, v, known.summaries)) if self.prepared else None
        if step is None or not step.serves(q):
            return None
        used = rows.start + max(rows.stops)
        new_tokens = used - max(rows.start, known.summarized)
        if new_tokens <= 0 or known.summaries.bound != self.plan.budget.bound:
            return None
        lengths = memory.lengths(rows.stops, q.device)
        out = step(q, k, v, lengths, known.summaries, self.sinks, new_tokens)
        if rows.start == 0 and k.shape[0] == of_cache.shape[0]:
            replay = step.replay(q.transpose(1, 2), of_cache, v.transpose(1, 2), lengths, self.sinks)
            form = known.summaries.low.shape
            memory.repeated = None if replay is None else StepTaken(replay, known.summarized, used, form)
        known.keys, known.summarized = weakref.ref(of_cache), used
        return out

    def _prepare(self, q: Tensor, cache: PagedCache) -> None:
        """Prepare a step with q (B, Lq, Hq, D) that just ran, if its launches can be repeated."""
        step = prepare_step(self.plan.budget, q, cache, scale=self.scale, softcap=self.softcap)
        if step is None or cache.summaries is None:
            return
        if len(self.prepared) >= MAX_STEPS:
            self.prepared.clear()
        self.prepared[self._key(q, cache.k, cache.v, cache.summaries)] = step

    def _key(self, q: Tensor, k: Tensor, v: Tensor, summaries: PageSummaries) -> Hashable:
        """Return what must be equal in steps that one prepared step serves, for tensors (B, L, H, D)."""
        batch, seqlen_k, heads, _ = k.shape
        pages = -(-seqlen_k // self.plan.page_size)
        settings, queries = (self.kind, self.scale, self.softcap, self.sinks is None), (q.shape, q.dtype, q.device)
        return (*settings, *queries, batch, pages, heads, v.shape[3], k.dtype, summaries.low.shape)


def repeat_step(
    step: StepTaken, memory: CacheMemory, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor | None:
    """Repeat a step of another layer; None if this layer differs.

    Args:
        step: the step that the other layer took.
        memory: the summaries.
        layer: index of the layer.
        q: (B, Hq, Lq, D).
        k: (B, Hk, Lk, D).
        v: (B, Hk, Lk, D).
        sinks: (Hq,) or None.

    Returns:
        (B, Lq, Hq, D).
    """
    known = memory.of(layer, 0)
    if known is None or known.summarized != step.summarized or known.summaries.low.shape != step.form:
        return None
    out = step.replay(q, k, v, known.summaries, sinks)
    if out is not None:
        known.keys, known.summarized = weakref.ref(k), step.used
    return out


def _fits(summaries: PageSummaries, cache: PagedCache) -> bool:
    batch, _, heads, head_dim = summaries.low.shape
    return (batch, heads, head_dim) == (cache.batch, cache.kv_heads, cache.head_dim)
