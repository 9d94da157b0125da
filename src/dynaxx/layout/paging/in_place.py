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
from dynaxx.layout.derived import Unset


class SequenceKeys(NamedTuple):
    """Keys and values of one sequence. Without `places`, its tokens are the rows of k and v."""

    k: Tensor  # (1, rows, kv_heads, head_dim); with places a view of a cache
    v: Tensor  # (1, rows, kv_heads, head_dim_v)
    seqlen_k: int
    places: Tensor | None = (
        None  # (kv_blocks,) int32: token t is in row places[t // kv_block] * kv_block + t % kv_block
    )

    def moved(self, layout: BlockLayout) -> BlockLayout:
        """Return a causal layout of the sequence with the blocks of k and v that hold its blocks.

        Kernels must not look at the lengths of k then. Under a causal mask they need not: the last block, which may
        hold fewer keys, is partial in every row.
        """
        if self.places is None:
            return layout
        blocks = layout.kv_indices.clamp(0, len(self.places) - 1)  # entries past the last row are undefined
        found = replace(layout, kv_indices=self.places.index_select(0, blocks))
        known = layout.derived.kv_order
        found.derived.form = layout.form
        found.derived.kv_order = None if isinstance(known, Unset) and layout.device.type != "cpu" else known
        return found


def rows_of(x: Tensor) -> tuple[Tensor, int] | None:
    """Return a page tensor as rows at equal distances, and the rows from one page to the next; None if it has no such.

    Args:
        x: (num_pages, page_size, kv_heads, head_dim), any strides.

    Returns:
        A view (1, rows, kv_heads, head_dim) of the same memory, in which token t of page p is row p * step + t; and
        `step`. Rows of different heads may overlap in memory.
    """
    num_pages, page_size, heads, head_dim = x.shape
    page, token, head, unit = x.stride()
    if not num_pages or token <= 0 or page % (token * page_size) or unit != 1:
        return None
    step = page // token
    rows = (num_pages - 1) * step + page_size
    view = x.as_strided((1, rows, heads, head_dim), (rows * token, token, head, 1), x.storage_offset())
    return view, step


def places_of(page_table: Tensor, page_size: int, step: int, kv_block: int) -> Tensor:
    """Return (pages * page_size / kv_block,) int32: the block of rows that holds each block of a sequence.

    Args:
        page_table: (pages,) physical page of each page of the sequence.
        page_size: tokens of a page, a multiple of `kv_block`.
        step: rows from one page to the next, a multiple of `page_size`; see `rows_of`.
        kv_block: tokens of a block.
    """
    inside = torch.arange(page_size // kv_block, dtype=torch.int32, device=page_table.device)
    return (page_table.to(torch.int32)[:, None] * (step // kv_block) + inside).flatten()
