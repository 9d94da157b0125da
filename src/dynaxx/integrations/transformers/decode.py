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
from typing import Any

import torch
from torch import Tensor

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
        self._layers: dict[int, _LayerMemory] = {}
        self._lengths: dict[tuple[int, ...], Tensor] = {}

    def start_pass(self, cache: Any) -> None:
        """Before a forward pass: forget what was replaced since, and what will be overwritten."""
        self._lengths.clear()
        past = int(cache.get_seq_length())
        layers = getattr(cache, "layers", ())
        for index, memory in list(self._layers.items()):
            keys = getattr(layers[index], "keys", None) if index < len(layers) else None
            if keys is None or keys is not memory.keys():
                del self._layers[index]
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

    def with_summaries(self, layer: int, keys: Tensor, cache: PagedCache, bound: float, used: int) -> PagedCache:
        """Return the cache with its summaries up to date; `used` is the most keys that a sequence has."""
        memory = self._layers.get(layer)
        if memory is not None and memory.summaries.bound == bound and _fits(memory.summaries, cache):
            summaries = memory.summaries
            if summaries.low.shape[1] < cache.max_pages:
                summaries = summaries.grown(cache.max_pages + SPARE_PAGES)
            cache = replace(cache, summaries=summaries)
            if used > memory.summarized:
                cache = summarize_pages(cache, new_tokens=used - memory.summarized)
        else:
            cache = summarize_pages(cache, bound=bound)
        assert cache.summaries is not None, "just made"
        self._layers[layer] = _LayerMemory(cache.summaries, weakref.ref(keys), used)
        return cache


class CacheMemories:
    """The memory of every cache that is in use."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, CacheMemory] = weakref.WeakKeyDictionary()

    def start_pass(self, cache: Any) -> CacheMemory | None:
        """Return the memory of the cache that a pass is about to use; None without one."""
        if cache is None or not hasattr(cache, "get_seq_length"):
            return None
        memory = self._of.get(cache)
        if memory is None:
            memory = self._of[cache] = CacheMemory()
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
    """(B, Lq, Hq, D) from q (B, Hq, Lq, D) and the cache's k and v (B, Hk, Lk, D)."""
    stops, starts = tuple(run.k_stop for run in runs), tuple(run.k_start for run in runs)
    cache = PagedCache.contiguous(
        k.transpose(1, 2),
        v.transpose(1, 2),
        page_size=plan.page_size,
        seqused_k=memory.lengths(stops, q.device),
        leftpad_k=memory.lengths(starts, q.device) if any(starts) else None,
    )
    if not plan.budget.reads_everything:
        cache = memory.with_summaries(layer, k, cache, plan.budget.bound, max(stops))
    return sparse_decode(q.transpose(1, 2), cache, plan.budget, scale=scale, softcap=softcap, sinks=sinks)


def _fits(summaries: PageSummaries, cache: PagedCache) -> bool:
    batch, _, heads, head_dim = summaries.low.shape
    return (batch, heads, head_dim) == (cache.batch, cache.kv_heads, cache.head_dim)
