# SPDX-License-Identifier: Apache-2.0
"""`CompressedPages`: the compressed tokens of native sparse attention, stored page by page next to a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.paging.paged_cache import PagedCache
from dynaxx.trained.nsa.spans import NsaSizes


def check_pages(page_size: int, sizes: NsaSizes) -> None:
    """Raise ValueError unless pages divide selection blocks and hold a whole number of compression strides."""
    if sizes.slc_block % page_size or page_size % sizes.cmp_stride:
        raise ValueError(
            f"pages must divide slc_block = {sizes.slc_block} and be a multiple of cmp_stride = {sizes.cmp_stride}, "
            f"got {page_size} tokens"
        )


def compressed_of(cache: PagedCache) -> CompressedPages:
    """Return a cache's compressed tokens; raise ValueError if it has none."""
    if not isinstance(cache.compressed, CompressedPages):
        raise ValueError("`cache` must have compressed tokens; add them with compress_pages(cache, sizes, ...)")
    return cache.compressed


class NsaLengths(NamedTuple):
    """Lengths that the branches of a decode step read, each (batch,) int32."""

    positions: Tensor  # seqused_k // cmp_stride, number of slots for compressed tokens, hidden slots included
    hidden: Tensor  # cmp_block // cmp_stride - 1, number of leading slots that hold no compressed token
    tokens: Tensor  # number of compressed tokens
    blocks: Tensor  # number of selection blocks
    window: Tensor  # first key of the window


@typed
@dataclass(frozen=True)
class CompressedPages:
    """Compressed keys and values. Each lies in the page that holds the last key of its window.

    The tensors are laid out by physical page, so they follow the page table. The compressed tokens of a page depend
    only on that page and the pages before it. Sequences that share a prefix therefore share its compressed tokens, and
    a page that is copied for a fork takes its compressed tokens along.

    The compressed tokens form a cache of their own. Let c = cmp_block / cmp_stride. Compressed token i lies at position
    i + c - 1, the first c - 1 positions are hidden, and s keys give s // cmp_stride positions.

    Args:
        k: (num_pages, page_size // cmp_stride, kv_heads, head_dim), or for a contiguous cache
            (batch, seqlen_k // cmp_stride, kv_heads, head_dim).
        v: like `k`, with head_dim_v.
        sizes: sizes of the branches that read the compressed tokens.
    """

    k: Tensor
    v: Tensor
    sizes: NsaSizes

    @classmethod
    def empty(cls, cache: PagedCache, sizes: NsaSizes) -> CompressedPages:
        """Allocate zeros for a cache's compressed tokens; `compress_pages` fills them. Raises like `check_pages`."""
        check_pages(cache.page_size, sizes)
        draw = lambda x: x.new_zeros(x.shape[0], x.shape[1] // sizes.cmp_stride, *x.shape[2:])
        return cls(draw(cache.k), draw(cache.v), sizes)

    @property
    def hidden(self) -> int:
        """Number of positions before the first compressed token."""
        return self.sizes.cmp_block // self.sizes.cmp_stride - 1

    def as_cache(self, cache: PagedCache, lengths: NsaLengths) -> PagedCache:
        """Return the compressed tokens as a `PagedCache` of their own, for `sparse_decode`."""
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

    def check(self, cache: PagedCache) -> None:
        """Raise ValueError unless these match a cache. A contiguous cache may be shorter than these tensors allow."""
        check_pages(cache.page_size, self.sizes)
        for mine, x in ((self.k, cache.k), (self.v, cache.v)):
            room = mine.shape[1] - x.shape[1] // self.sizes.cmp_stride
            differs = (mine.shape[0], *mine.shape[2:]) != (x.shape[0], *x.shape[2:]) or mine.device != x.device
            if differs or room < 0 or (room and cache.is_paged):
                raise ValueError(
                    f"`compressed` must match this cache, got {tuple(self.k.shape)} for k {tuple(cache.k.shape)}; "
                    "make them with compress_pages(cache, sizes, ...)"
                )

    def grown(self, positions: int) -> CompressedPages:
        """Return a copy for a contiguous cache with room for `positions` positions."""
        larger = lambda x: torch.cat([x, x.new_zeros(x.shape[0], positions - x.shape[1], *x.shape[2:])], 1)
        return CompressedPages(larger(self.k), larger(self.v), self.sizes)
