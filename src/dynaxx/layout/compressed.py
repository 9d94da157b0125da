# SPDX-License-Identifier: Apache-2.0
"""`CompressedPages`: the compressed tokens of a paged cache, kept page by page beside its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.nsa import NativeSizes

if TYPE_CHECKING:
    from dynaxx.layout.paging import PagedCache


def check_pages(page_size: int, sizes: NativeSizes) -> None:
    """Raise ValueError for pages that do not divide selection blocks, or hold no whole number of strides."""
    if sizes.slc_block % page_size or page_size % sizes.cmp_stride:
        raise ValueError(
            f"pages must divide slc_block = {sizes.slc_block} and be a multiple of cmp_stride = {sizes.cmp_stride}, "
            f"got {page_size} tokens"
        )


class NativeLengths(NamedTuple):
    """What the branches of a step read of each sequence, each (batch,) int32."""

    positions: Tensor  # seqused_k // cmp_stride, of compressed tokens
    hidden: Tensor  # the first of these that are none, cmp_block // cmp_stride - 1
    tokens: Tensor  # compressed tokens
    blocks: Tensor  # selection blocks
    window: Tensor  # first key of the window


@typed
@dataclass(frozen=True)
class CompressedPages:
    """Compressed keys and values, each in the page that holds the last key of its window, laid out by physical page.

    So they follow the page table, and what a page has of them depends on it and the pages before it alone: a prefix
    that sequences share has one set of them, and a page that is copied for a fork takes its own along.

    They are a cache themselves: with c = cmp_block / cmp_stride, compressed token i lies at position i + c - 1, the
    first c - 1 positions are hidden, and s keys make s // cmp_stride positions.

    Args:
        k: (num_pages, page_size // cmp_stride, kv_heads, head_dim); contiguous:
            (batch, seqlen_k // cmp_stride, kv_heads, head_dim).
        v: the same with head_dim_v.
        sizes: of the branches that read them.
    """

    k: Tensor
    v: Tensor
    sizes: NativeSizes

    @classmethod
    def empty(cls, cache: PagedCache, sizes: NativeSizes) -> CompressedPages:
        """Memory for the compressed tokens of a cache, to be filled by `compress_pages`; raises as `check_pages`."""
        check_pages(cache.page_size, sizes)
        draw = lambda x: x.new_zeros(x.shape[0], x.shape[1] // sizes.cmp_stride, *x.shape[2:])
        return cls(draw(cache.k), draw(cache.v), sizes)

    @property
    def hidden(self) -> int:
        """Positions before the first compressed token."""
        return self.sizes.cmp_block // self.sizes.cmp_stride - 1

    def as_cache(self, cache: PagedCache, lengths: NativeLengths) -> PagedCache:
        """Return the compressed tokens of a cache as one of their own, for `sparse_decode`."""
        return replace(
            cache,
            k=self.k,
            v=self.v,
            seqused_k=lengths.positions,
            page_size=cache.page_size // self.sizes.cmp_stride,
            leftpad_k=lengths.hidden if self.hidden else None,
            summaries=None,
            compressed=None,
        )

    def fits(self, cache: PagedCache) -> bool:
        """Whether it was made for a cache of this shape; a contiguous one may have less room than it has."""
        for mine, x in ((self.k, cache.k), (self.v, cache.v)):
            room = mine.shape[1] - x.shape[1] // self.sizes.cmp_stride
            if (mine.shape[0], *mine.shape[2:]) != (x.shape[0], *x.shape[2:]) or room < 0 or (room and cache.is_paged):
                return False
        return self.k.device == cache.device

    def grown(self, positions: int) -> CompressedPages:
        """Return the same of a contiguous cache, with room for more."""
        larger = lambda x: torch.cat([x, x.new_zeros(x.shape[0], positions - x.shape[1], *x.shape[2:])], 1)
        return CompressedPages(larger(self.k), larger(self.v), self.sizes)
