# SPDX-License-Identifier: Apache-2.0
"""Decoding under a policy: attend from a step's queries to the cache of transformers, with summaries of its pages.

A step is a few queries over more keys. The cache stays that of transformers: the tensors of a `DynamicCache` or
`StaticCache` form a contiguous `PagedCache`. Each step updates the summaries as long as the cache keeps its tensors. If
the tensors are replaced (beam search permutes rows, assisted decoding crops), the summaries are rebuilt, which reads
all keys once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.identity import ByIdentity
from dynaxx.integrations.transformers.masks import Run
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.policy.decode import DecodePlan

SPARE_PAGES = 64  # pages by which summaries grow at a time


@dataclass
class _LayerMemory:
    """The summaries of one layer of a cache."""

    summaries: PageSummaries
    keys: weakref.ref[Tensor]  # the summarised tensor
    summarized: int  # number of first keys that the summaries cover


class CacheMemory:
    """The summaries of one transformers cache, by layer. They live as long as the cache."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], _LayerMemory] = {}  # by layer and first row
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

    def lengths(self, values: tuple[int, ...], device: torch.device) -> Tensor:
        """Return lengths as a (batch,) int32 tensor. The layers of a pass on one device share it."""
        key = (*values, -1 if device.index is None else device.index)
        found = self._lengths.get(key)
        if found is None:
            found = torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
            self._lengths[key] = found
        return found

    def with_summaries(
        self, layer: int, keys: Tensor, cache: PagedCache, bound: float, *, row: int, start: int, used: int
    ) -> PagedCache:
        """Return a cache with current summaries.

        Args:
            layer: index of the layer.
            keys: the tensor of transformers' cache.
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
        self._layers[layer, row] = _LayerMemory(cache.summaries, weakref.ref(keys), start + used)
        return cache


class CacheMemories:
    """The memories of all caches in use."""

    def __init__(self) -> None:
        self._of: ByIdentity[CacheMemory] = ByIdentity()

    def start_pass(self, cache: Any) -> CacheMemory | None:
        """Return the memory of the cache that a pass will use, or None without a cache."""
        if cache is None or not hasattr(cache, "get_seq_length"):
            return None
        memory = self._of.get(cache)
        if memory is None:
            memory = CacheMemory()
            self._of.put(cache, memory)
        memory.start_pass(cache)
        return memory


@torch.no_grad()
def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: list[Run],
    plan: DecodePlan,
    layer: int,
    memory: CacheMemory,
    scale: float | None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from q (B, Hq, Lq, D) to the cache's k and v (B, Hk, Lk, D), and return (B, Lq, Hq, D).

    Pages start at the first real key of each row, so that left padding has no influence. Rows with different padding
    run separately.
    """
    starts = [run.k_start for run in runs]
    bounds = [0, *(row for row in range(1, len(runs)) if starts[row] != starts[row - 1]), len(runs)]
    outs = []
    for first, last in pairwise(bounds):
        start, stops = starts[first], tuple(run.k_stop - starts[first] for run in runs[first:last])
        rows, columns = slice(first, last), slice(start, None)
        cache = PagedCache.contiguous(
            k[rows, :, columns].transpose(1, 2),
            v[rows, :, columns].transpose(1, 2),
            page_size=plan.page_size,
            seqused_k=memory.lengths(stops, q.device),
        )
        if not plan.budget.reads_everything:
            cache = memory.with_summaries(layer, k, cache, plan.budget.bound, row=first, start=start, used=max(stops))
        queries = q[rows].transpose(1, 2)
        outs.append(sparse_decode(queries, cache, plan.budget, scale=scale, softcap=softcap, sinks=sinks))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _fits(summaries: PageSummaries, cache: PagedCache) -> bool:
    batch, _, heads, head_dim = summaries.low.shape
    return (batch, heads, head_dim) == (cache.batch, cache.kv_heads, cache.head_dim)
