# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one sequence where a paged cache holds them, for kernels that read whole blocks.

A kernel over a layout reads block `i` of a sequence at row `i * kv_block` of each head. If the tokens of a page lie at
equal distances, a page is a whole number of blocks of the cache's memory too. Then the layout's block indices, looked
up in `places`, lead the kernel to the pages, and nothing is copied.

    layout    block 0   block 1   block 2     blocks of the sequence
    places       7         2         9        blocks of the cache's memory
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout.block_layout import BlockLayout

MovedLayouts = dict[int, tuple[BlockLayout, BlockLayout]]  # key: id of a layout; value: that layout, its `moved` one


class SequenceKeys(NamedTuple):
    """Keys and values of one sequence. Without `places`, its tokens are the rows of k and v.

    With places, token t is in row places[t // kv_block] * kv_block + t % kv_block of k and v, which view a cache.
    """

    k: Tensor  # (1, rows, kv_heads, head_dim)
    v: Tensor  # (1, rows, kv_heads, head_dim_v)
    seqlen_k: int
    places: Tensor | None = None  # (kv_blocks,) int32
    kept: MovedLayouts | None = None  # cache of `moved`, which the layers of a step share; None caches nothing

    def moved(self, layout: BlockLayout) -> BlockLayout:
        """Return a causal layout of the sequence with the blocks of k and v that hold its blocks.

        Kernels must not look at the lengths of k then. Under a causal mask they need not: the last block, which may
        hold fewer keys, is partial in every row.
        """
        if self.places is None:
            return layout
        if self.kept is None or layout.form is not None:
            return _moved(layout, self.places)
        known = self.kept.get(id(layout))
        if known is None:
            known = self.kept[id(layout)] = (layout, _moved(layout, self.places))
        return known[1]


def _moved(layout: BlockLayout, places: Tensor) -> BlockLayout:
    before = layout.derived
    if before.placed is not None and before.placed[0] is places:
        indices = before.placed[1]
    else:
        blocks = layout.kv_indices.clamp(0, len(places) - 1)  # entries past the last row are undefined
        indices = places.index_select(0, blocks)
    found = replace(layout, kv_indices=indices)
    now = found.derived
    now.form, now.kv_order, now.make_host = before.form, before.kv_order, before.make_host  # the counts are the same
    return found


def rows_of(x: Tensor) -> tuple[Tensor, int] | None:
    """View a tensor of pages as rows at equal distances; None if its strides do not allow such a view.

    Args:
        x: (num_pages, page_size, kv_heads, head_dim), any strides.

    Returns:
        (view, step): a view (1, rows, kv_heads, head_dim) of the same memory, in which token t of page p is row
        p * step + t. Rows of different heads may overlap in memory.
    """
    num_pages, page_size, heads, head_dim = x.shape
    page, token, head, unit = x.stride()
    page = page if num_pages > 1 else token * page_size  # torch gives one page any stride
    if not num_pages or token <= 0 or page % (token * page_size) or unit != 1:
        return None
    step = page // token
    rows = (num_pages - 1) * step + page_size
    view = x.as_strided((1, rows, heads, head_dim), (rows * token, token, head, 1))
    return view, step


def divided_pages(x: Tensor, page_size: int) -> tuple[Tensor, int]:
    """View a tensor of pages as smaller pages of the same memory; `places_of` tells where the parts of a page are.

    Args:
        x: (num_pages, tokens, kv_heads, head_dim). If a head's tokens lie together, pages of the view between the parts
            of two pages overlap other heads, and nothing reads them.
        page_size: tokens of a smaller page.

    Returns:
        (view, step): a view (n, page_size, kv_heads, head_dim), and the rows from one page of `x` to the next.

    Raises:
        ValueError: `page_size` does not divide the pages, or their distance is no whole number of pages.
    """
    if page_size < 1 or x.shape[1] % page_size:
        raise ValueError(f"`page_size` must divide the pages' {x.shape[1]} tokens, got {page_size}")
    if not x.shape[0]:
        return x[:, :page_size], x.shape[1]
    found = rows_of(x)
    if found is None:
        raise ValueError(
            f"pages of strides {x.stride()} cannot be viewed as pages of {page_size} tokens: one must begin a whole "
            f"number of {x.shape[1]} tokens behind another, with a dense last dimension"
        )
    return found[0][0].unflatten(0, (-1, page_size)), found[1]


def divided_table(page_table: Tensor, x: Tensor, step: int, page_size: int) -> Tensor:
    """Return the page table (batch, max_pages * parts) int32 of the view that `divided_pages` made of x.

    Args:
        page_table: (batch, max_pages) physical page of each page; pages that do not exist have no parts that do.
        x: what was divided.
        step: rows from one page of `x` to the next.
        page_size: tokens of a smaller page.
    """
    pages = page_table.clamp(-1, len(x))  # others could wrap to parts that exist
    return places_of(pages, x.shape[1], step, page_size).clamp_(min=-1)


def places_of(page_table: Tensor, page_size: int, step: int, kv_block: int) -> Tensor:
    """Return (..., pages * page_size / kv_block) int32: the block of rows that holds each block of a sequence.

    Args:
        page_table: (..., pages) physical page of each page of the sequence; blocks of a negative one are negative.
        page_size: tokens of a page, a multiple of `kv_block`.
        step: rows from one page to the next, a multiple of `page_size`; see `rows_of`.
        kv_block: tokens of a block.
    """
    first = page_table.to(torch.int32) * (step // kv_block)
    if page_size == kv_block:
        return first
    blocks = torch.arange(page_size // kv_block, dtype=torch.int32, device=first.device)
    return (first[..., None] + blocks).flatten(-2)
