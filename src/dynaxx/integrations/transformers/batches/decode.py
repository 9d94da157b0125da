# SPDX-License-Identifier: Apache-2.0
"""Decoding by page budgets in transformers' continuous batching: summaries of a paged cache, and attention over it.

Summaries are stored by physical page, but the cache does not report when a page gets other keys: blocks are freed and
reused, copied for forked requests, and restored from the host. Summaries are therefore valid per request, for the keys
that are known to have stayed in place. The rest is summarized again when the request decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.runtime.routing import DenseReason
from dynaxx.integrations.transformers.batches.step import BatchRow, BatchStep, CachedRequests
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.decode import sparse_decode, summarize_pages
from dynaxx.policy.resolve import DecodePlan


class BatchMemory:
    """The requests of one allocator of a `PagedAttentionCache`, and summaries of its pages.

    All layers of an allocator share one tensor, page by page, and so do their summaries.
    """

    def __init__(self) -> None:
        self._requests = CachedRequests()
        self._summaries: dict[tuple[int, float], PageSummaries] = {}  # by page size and bound
        self._plans: dict[int, DecodePlan] = {}

    def open(self, allocator: Any, arguments: dict[str, Any], plans: dict[int, DecodePlan]) -> BatchStep:
        """Begin a step.

        Args:
            allocator: the allocator of the layers.
            arguments: the arguments of its first attention call.
            plans: decode rules by layer; if they changed, all summaries are discarded.
        """
        if plans is not self._plans:
            self._plans, self._summaries = plans, {}
            self._requests.forget_summaries()
        rows = self._requests.rows(allocator, arguments)
        return BatchStep(rows, arguments["read_index"][allocator.index], arguments["attention_mask"])

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        allocator: Any,
        layer: int,
        step: BatchStep,
        rows: Sequence[BatchRow],
        scale: float | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the last token of some rows to the pages that the layer's plan chooses.

        Args:
            q: (rows, 1, q_heads, head_dim). The keys of the step must be in the cache.
            allocator: the allocator of the layer.
            layer: index of the layer.
            step: the step.
            rows: the requests to compute.
            scale: softmax scale.
            softcap: cap on scores.
            sinks: (q_heads,) learned sinks.

        Returns:
            A tensor of the shape of q.
        """
        plan = self._plans[layer]
        cache = _cache_of(allocator, layer, step, rows, plan.page_size)
        if plan.budget.reads_everything:
            return sparse_decode(q, cache, plan.budget, scale=scale, softcap=softcap, sinks=sinks)
        cache = replace(cache, summaries=self._summaries_of(allocator, cache, plan))
        news = [row.run.seqlen_k - row.request.summarized.get(layer, 0) for row in rows]
        for few in (True, False):  # first steps of requests summarize all of their keys; the others run together
            some = [row for row, new in zip(rows, news, strict=True) if (new <= plan.page_size) == few]
            if some:
                part = replace(_cache_of(allocator, layer, step, some, plan.page_size), summaries=cache.summaries)
                most = max(new for new in news if (new <= plan.page_size) == few)
                summarize_pages(part, new_tokens=most)
        for row in rows:
            row.request.summarized[layer] = row.run.seqlen_k
        return sparse_decode(q, cache, plan.budget, scale=scale, softcap=softcap, sinks=sinks)

    def _summaries_of(self, allocator: Any, cache: PagedCache, plan: DecodePlan) -> PageSummaries:
        """Return the summaries of a layer's pages, as views."""
        key = plan.page_size, plan.budget.bound
        every = allocator.cache_tensor
        page = plan.page_size * cache.kv_heads * cache.head_dim  # elements per page
        if key not in self._summaries:
            pages = every.view(-1, *cache.k.shape[1:])
            self._summaries[key] = PageSummaries.empty(replace(cache, k=pages, v=pages), plan.budget.bound)
        return self._summaries[key].beginning_at((cache.k.storage_offset() - every.storage_offset()) // page)


def page_size_reason(allocator: Any, page_size: int) -> DenseReason | None:
    """Return why the cache cannot be read in pages of `page_size` tokens, or None if it can."""
    if allocator.tokens_per_page % page_size == 0 and allocator.supports_block_table:
        return None
    return DenseReason.PAGE_SIZE


def _cache_of(allocator: Any, layer: int, step: BatchStep, rows: Sequence[BatchRow], page_size: int) -> PagedCache:
    """Return the cache of some rows, as views."""
    k, v = (x.view(-1, page_size, *x.shape[2:]) for x in allocator.get_cache_for_block_table(layer))
    used = torch.tensor([row.run.seqlen_k for row in rows], dtype=torch.int32, device="cpu").to(
        k.device, non_blocking=True
    )
    return PagedCache(k, v, used, step.page_table(rows, page_size))
