# SPDX-License-Identifier: Apache-2.0
"""Decoding under a policy: a step's queries over the cache of transformers, with summaries kept beside that cache.

A step is a few queries over more keys. The cache itself stays transformers' own: a `DynamicCache` or `StaticCache` is a
contiguous `PagedCache` of its own tensors. Summaries are brought up to date with every step as long as the cache's
tensors are those of the step before; what replaces them (beam search permutes rows, assisted decoding crops) makes them
afresh, which reads all keys once.
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

SPARE_PAGES = 64  # summaries grow by so many at a time


@dataclass
class _LayerMemory:
    """What is known of one layer of a cache."""

    summaries: PageSummaries
    keys: weakref.ref[Tensor]  # the tensor that they were made from
    summarized: int  # keys, from the first on, that they cover


class CacheMemory:
    """Summaries of one transformers cache, by layer. Kept by the cache, and only as long as it."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], _LayerMemory] = {}  # by layer, and the first row that it is of
        self._lengths: dict[tuple[int, ...], Tensor] = {}

    def start_pass(self, cache: Any) -> None:
        """Before a forward pass: forget what was replaced since, and what will be overwritten."""
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
        """(batch,) int32; layers of a pass share them, each on its device."""
        key = (*values, -1 if device.index is None else device.index)
        found = self._lengths.get(key)
        if found is None:
            found = torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
            self._lengths[key] = found
        return found

    def with_summaries(
        self, layer: int, keys: Tensor, cache: PagedCache, bound: float, *, row: int, start: int, used: int
    ) -> PagedCache:
        """Return a cache with its summaries up to date.

        Args:
            layer: of the model.
            keys: the tensor of transformers' cache.
            cache: some rows of it, from column `start` on.
            bound: of the summaries.
            row: the first of the rows.
            start: the column of the first key.
            used: the most keys that a sequence has.
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
    """The memory of every cache that is in use."""

    def __init__(self) -> None:
        self._of: ByIdentity[CacheMemory] = ByIdentity()

    def start_pass(self, cache: Any) -> CacheMemory | None:
        """Return the memory of the cache that a pass is about to use; None without one."""
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
    """Attend from q (B, Hq, Lq, D) to the cache's k and v (B, Hk, Lk, D): (B, Lq, Hq, D).

    Pages are counted from the first real key of each row, so that padding on the left changes nothing: rows that start
    at other columns run apart.
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
