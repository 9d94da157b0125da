# SPDX-License-Identifier: Apache-2.0
"""`PageSummaries`: what choosing pages knows of each page's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.pages import PageStrides, page_strides

if TYPE_CHECKING:
    from dynaxx.layout.paging import PagedCache

SUMMARY_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


@typed
@dataclass(frozen=True)
class PageSummaries:
    """What choosing pages knows of each page's keys, laid out by physical page, so that it follows the page table.

    The score of a page for a query is relu(q) . high + min(q, 0) . low, summed over the queries and heads that choose
    together: the largest score that a key of the page may have (Quest). `bound` moves both vectors towards the mean
    key, and at 0.0 they are the mean, one tensor.

    Args:
        low: (num_pages, kv_heads, head_dim) = mean + bound * (min - mean), floats or int8; contiguous:
            (batch, pages, kv_heads, head_dim).
        high: the same of max; `low` itself where bound is 0.
        bound: from 0.0, the mean, to 1.0, min and max.
        scale: fp32 (num_pages, kv_heads) where both are int8, value = stored * scale; else None.

    Raises:
        TypeError, ValueError: tensors that do not fit together.
    """

    low: Tensor
    high: Tensor
    bound: float
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.bound <= 1:
            raise ValueError(f"`bound` must be from 0.0 to 1.0, got {self.bound}")
        if self.low.shape != self.high.shape or self.low.ndim not in (3, 4):
            raise ValueError(
                "`low` and `high` must both be (num_pages, kv_heads, head_dim), or with batch before, "
                f"got {tuple(self.low.shape)} and {tuple(self.high.shape)}"
            )
        if self.low.dtype not in SUMMARY_DTYPES or self.low.dtype != self.high.dtype:
            raise TypeError(f"summaries must both be one of {SUMMARY_DTYPES}, got {self.low.dtype}, {self.high.dtype}")
        wanted = self.low.shape[:-1] if self.low.dtype == torch.int8 else None
        if (None if self.scale is None else self.scale.shape) != wanted:
            raise ValueError("`scale` must be one number per page and kv head for int8 summaries, and None for others")
        if (self.bound == 0) != (self.low is self.high):
            raise ValueError("`high` must be `low` itself where `bound` is 0, and only there")

    @classmethod
    def empty(cls, cache: PagedCache, bound: float = 1.0, dtype: torch.dtype | None = None) -> PageSummaries:
        """Memory for the summaries of a cache, to be filled by `summarize_pages`.

        Args:
            dtype: default int8 (fp64 for fp64 caches): less traffic is worth more than the last bits of a score.
        """
        if dtype is None:
            dtype = torch.float64 if cache.k.dtype == torch.float64 else torch.int8
        lead = () if cache.is_paged else (cache.batch,)
        pages = cache.k.shape[0] if cache.is_paged else cache.max_pages
        memory = (*lead, cache.kv_heads, pages, cache.head_dim)  # the pages of a head lie together: scoring reads those
        empty = lambda: torch.zeros(memory, dtype=dtype, device=cache.device).transpose(-3, -2)
        low = empty()
        scale = None
        if dtype == torch.int8:
            scale = torch.zeros(memory[:-1], dtype=torch.float32, device=cache.device).transpose(-2, -1)
        return cls(low, low if bound == 0 else empty(), bound, scale)

    def fits(self, cache: PagedCache) -> bool:
        """Whether it was made for a cache of this shape; it may have room for more pages than there are."""
        lead, own = self.low.shape[:-2], self.low.shape[-2:]
        pages = cache.k.shape[0] if cache.is_paged else cache.max_pages
        there = len(lead) == 1 if cache.is_paged else lead[:-1] == (cache.batch,)
        return (
            there and lead[-1] >= pages and own == (cache.kv_heads, cache.head_dim) and self.low.device == cache.device
        )

    def grown(self, pages: int) -> PageSummaries:
        """Return the same of a contiguous cache, with room for more pages."""

        def larger(x: Tensor) -> Tensor:
            room = x.new_zeros(*x.transpose(1, 2).shape[:2], pages, *x.shape[3:]).transpose(1, 2)
            room[:, : x.shape[1]] = x
            return room

        low = larger(self.low)
        high = low if self.high is self.low else larger(self.high)
        return PageSummaries(low, high, self.bound, None if self.scale is None else larger(self.scale))

    def beginning_at(self, page: int) -> PageSummaries:
        """Those from a physical page on, as views: of a cache that begins there."""
        low = self.low[page:]
        high = low if self.high is self.low else self.high[page:]
        return PageSummaries(low, high, self.bound, None if self.scale is None else self.scale[page:])

    def strides(self) -> PageStrides:
        """Of `low` and `high` alike; there is one row per page and head."""
        return page_strides(self.low)

    def scale_strides(self) -> PageStrides:
        """Of `scale`; zeros where there is none."""
        return PageStrides(0, 0, 0, 0) if self.scale is None else page_strides(self.scale[..., None])
