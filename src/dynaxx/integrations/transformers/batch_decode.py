# SPDX-License-Identifier: Apache-2.0
"""Decoding by page budgets within transformers' continuous batching: summaries of a paged cache, and attention over it.

Summaries lie by physical page, and the cache does not tell when a page gets other keys: blocks are freed and given to
other requests, copied for forked ones, brought back from the host. So they are trusted for one request at a time, as
far as its keys were seen to stay where they are, and made again for the rest of it when it decodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.batch_step import BatchStep, Row, Tenants
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.policy.decode import DecodePlan


class BatchMemory:
    """What is kept beside one allocator of a `PagedAttentionCache`: its requests, and summaries of its pages.

    All layers of an allocator lie in one tensor, page by page, so their summaries do, too.
    """

    def __init__(self) -> None:
        self._tenants = Tenants()
        self._summaries: dict[tuple[int, float], PageSummaries] = {}  # by page size and bound
        self._plans: dict[int, DecodePlan] = {}

    def open(self, allocator: Any, arguments: dict[str, Any], plans: dict[int, DecodePlan]) -> BatchStep:
        """Begin a step.

        Args:
            arguments: of its first attention call, as transformers passes them.
            plans: by layer, what decoding does; where they are others than before, summaries are made afresh.
        """
        if plans is not self._plans:
            self._plans, self._summaries = plans, {}
            self._tenants.forget_summaries()
        rows = self._tenants.rows(allocator, arguments)
        return BatchStep(rows, arguments["read_index"][allocator.index], arguments["attention_mask"])

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        allocator: Any,
        layer: int,
        step: BatchStep,
        rows: Sequence[Row],
        scale: float | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the last token of some rows to the pages that the layer's plan chooses.

        Args:
            q: (rows, 1, q_heads, head_dim); the keys of the step are in the cache.

        Returns:
            As q.
        """
        plan = self._plans[layer]
        cache = _cache_of(allocator, layer, step, rows, plan.page_size)
        if plan.budget.reads_everything:
            return sparse_decode(q, cache, plan.budget, scale=scale, softcap=softcap, sinks=sinks)
        cache = replace(cache, summaries=self._summaries_of(allocator, cache, plan))
        news = [row.run.seqlen_k - row.tenant.summarized.get(layer, 0) for row in rows]
        for few in (True, False):  # a request that decodes for the first time is read whole, the others go together
            some = [row for row, new in zip(rows, news, strict=True) if (new <= plan.page_size) == few]
            if some:
                part = replace(_cache_of(allocator, layer, step, some, plan.page_size), summaries=cache.summaries)
                most = max(new for new in news if (new <= plan.page_size) == few)
                summarize_pages(part, new_tokens=most)
        for row in rows:
            row.tenant.summarized[layer] = row.run.seqlen_k
        return sparse_decode(q, cache, plan.budget, scale=scale, softcap=softcap, sinks=sinks)

    def _summaries_of(self, allocator: Any, cache: PagedCache, plan: DecodePlan) -> PageSummaries:
        """Those of a layer's pages, as views."""
        key = plan.page_size, plan.budget.bound
        every = allocator.cache_tensor
        page = plan.page_size * cache.kv_heads * cache.head_dim  # numbers
        if key not in self._summaries:
            pages = every.view(-1, *cache.k.shape[1:])
            self._summaries[key] = PageSummaries.empty(replace(cache, k=pages, v=pages), plan.budget.bound)
        return self._summaries[key].beginning_at((cache.k.storage_offset() - every.storage_offset()) // page)


class BatchMemories:
    """The memory of every paged cache that is in use, by its allocators."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, BatchMemory] = weakref.WeakKeyDictionary()

    def of(self, allocator: Any) -> BatchMemory:
        """Return the memory of one allocator."""
        return self._of.setdefault(allocator, BatchMemory())


def page_size_reason(allocator: Any, page_size: int) -> DenseReason | None:
    """Return why pages of so many tokens cannot be read out of the cache; None if they can."""
    if allocator.tokens_per_page % page_size == 0 and allocator.supports_block_table:
        return None
    return DenseReason.PAGE_SIZE


def _cache_of(allocator: Any, layer: int, step: BatchStep, rows: Sequence[Row], page_size: int) -> PagedCache:
    """Return the cache of some rows, as views."""
    k, v = (x.view(-1, page_size, *x.shape[2:]) for x in allocator.get_cache_for_block_table(layer))
    used = torch.tensor([row.run.seqlen_k for row in rows], dtype=torch.int32).to(k.device, non_blocking=True)
    return PagedCache(k, v, used, step.page_table(rows, page_size))
