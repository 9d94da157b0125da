# SPDX-License-Identifier: Apache-2.0
"""`PageSummaries`: bounds on the keys of each page, from which decoding estimates the attention of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynaxx.arguments import number, typed
from dynaxx.layout.paging.pages import PageStrides, page_strides

if TYPE_CHECKING:
    from dynaxx.layout.paging import PagedCache

SUMMARY_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)


@typed
@dataclass(frozen=True)
class PageSummaries:
    """Bounds on the keys of each page. They are laid out by physical page, so they follow the page table.

    The score of a page is max(q, 0) . high + min(q, 0) . low, summed over the queries and heads that select pages
    together. With min and max as bounds, this is an upper bound on the score of any key in the page (Quest). `bound`
    interpolates between the mean key and these bounds; at 0.0 both vectors are the mean and share one tensor.

    Args:
        low: (num_pages, kv_heads, head_dim) = mean + bound * (min - mean), floats or int8; contiguous:
            (batch, pages, kv_heads, head_dim).
        high: mean + bound * (max - mean), same shape and dtype; `low` itself if bound is 0.
        bound: from 0.0 (mean) to 1.0 (min and max).
        scale: fp32 (num_pages, kv_heads) for int8, value = stored * scale; else None.

    Raises:
        TypeError, ValueError: the tensors do not match each other.
    """

    low: Tensor
    high: Tensor
    bound: float
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Check `bound` and the shapes."""
        object.__setattr__(self, "bound", number("bound", self.bound))
        if not 0 <= self.bound <= 1:
            raise ValueError(f"`bound` must be from 0.0 to 1.0, got {self.bound}")
        if self.low.shape != self.high.shape or self.low.ndim not in (3, 4):
            raise ValueError(
                "`low` and `high` must both be (num_pages, kv_heads, head_dim) or (batch, pages, kv_heads, head_dim), "
                f"got {tuple(self.low.shape)} and {tuple(self.high.shape)}"
            )
        if self.low.dtype not in SUMMARY_DTYPES or self.low.dtype != self.high.dtype:
            raise TypeError(f"summaries must both be one of {SUMMARY_DTYPES}, got {self.low.dtype}, {self.high.dtype}")
        wanted = self.low.shape[:-1] if self.low.dtype == torch.int8 else None
        if (None if self.scale is None else self.scale.shape) != wanted:
            raise ValueError("`scale` must hold one number per page and kv head for int8 summaries, else be None")
        if (self.bound == 0) != (self.low is self.high):
            raise ValueError("`high` must be `low` itself if `bound` is 0, and a different tensor otherwise")

    @classmethod
    def empty(cls, cache: PagedCache, bound: float = 1.0, dtype: torch.dtype | None = None) -> PageSummaries:
        """Allocate summaries for a cache; `summarize_pages` fills them.

        Args:
            cache: cache whose keys are summarized.
            bound: see `PageSummaries`.
            dtype: defaults to int8 (fp64 for fp64 caches), because less memory traffic is worth more than the precision
                of a score.
        """
        if dtype is None:
            dtype = torch.float64 if cache.k.dtype == torch.float64 else torch.int8
        low = _zeros(cache, cache.head_dim, dtype)
        scale = _zeros(cache, 1, torch.float32)[..., 0] if dtype == torch.int8 else None
        return cls(low, low if bound == 0 else _zeros(cache, cache.head_dim, dtype), bound, scale)

    def fits(self, cache: PagedCache) -> bool:
        """Return whether the shapes match a cache; summaries may have room for more pages than the cache."""
        lead, own = self.low.shape[:-2], self.low.shape[-2:]
        pages = cache.k.shape[0] if cache.is_paged else cache.max_pages
        there = len(lead) == 1 if cache.is_paged else lead[:-1] == (cache.batch,)
        return (
            there and lead[-1] >= pages and own == (cache.kv_heads, cache.head_dim) and self.low.device == cache.device
        )

    def grown(self, pages: int) -> PageSummaries:
        """Return a copy for a contiguous cache with room for `pages` pages."""

        def larger(x: Tensor) -> Tensor:
            room = x.new_zeros(*x.transpose(1, 2).shape[:2], pages, *x.shape[3:]).transpose(1, 2)
            room[:, : x.shape[1]] = x
            return room

        low = larger(self.low)
        high = low if self.high is self.low else larger(self.high)
        return PageSummaries(low, high, self.bound, None if self.scale is None else larger(self.scale))

    def beginning_at(self, page: int) -> PageSummaries:
        """Return views of the summaries from a physical page on, for a cache that begins at that page."""
        low = self.low[page:]
        high = low if self.high is self.low else self.high[page:]
        return PageSummaries(low, high, self.bound, None if self.scale is None else self.scale[page:])

    def strides(self) -> PageStrides:
        """Return the strides of `low` and `high`, which are equal; there is one row per page and head."""
        return page_strides(self.low)

    def scale_strides(self) -> PageStrides:
        """Return the strides of `scale`, or zeros if it is None."""
        return PageStrides(0, 0, 0, 0) if self.scale is None else page_strides(self.scale[..., None])


def _zeros(cache: PagedCache, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros, (num_pages, kv_heads, width) or, for a contiguous cache, (batch, pages, kv_heads, width).

    A head's pages are adjacent, as scoring reads them. Where pages are parts of larger ones with heads between them,
    only parts take memory: they lie as the keys do.
    """
    if not cache.is_paged:
        memory = (cache.batch, cache.kv_heads, cache.max_pages, width)
        return torch.zeros(memory, dtype=dtype, device=cache.device).transpose(1, 2)
    pages, (page, _, head, _) = cache.k.shape[0], cache.k.stride()
    apart = head // page if pages > 1 and page else 0  # pages from one head to the next
    if apart == 0:
        return torch.zeros(cache.kv_heads, pages, width, dtype=dtype, device=cache.device).transpose(0, 1)
    rows = torch.zeros(pages + (cache.kv_heads - 1) * apart, width, dtype=dtype, device=cache.device)
    return rows.as_strided((pages, cache.kv_heads, width), (width, apart * width, 1))
