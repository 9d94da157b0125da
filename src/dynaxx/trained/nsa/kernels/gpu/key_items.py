# SPDX-License-Identifier: Apache-2.0
"""Index a selection by key, on the device and without synchronization.

The queries of each block are listed in ascending order and cut into items of bounded length. A block that every query
selects therefore occupies several programs instead of one slow one.

    block_indices -> cell of each entry -> sort by cell -> where cells start -> items per cell -> list of items

Legend: T queries, Hs selection heads, n slots, C selection blocks of all sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.spans import NsaSpans

WIDTH = 1024  # entries, cells or items per program


class ItemTables(NamedTuple):
    """The index of a chunk of queries as one kernel argument: fields of `Items` and `NsaSpans`."""

    p_entries: Tensor
    p_cell: Tensor
    p_begin: Tensor
    p_end: Tensor
    p_block_start: Tensor  # (C,) int32, first key row of each block
    p_last_key: Tensor  # (T,) int32, last key row that each query sees


@dataclass(frozen=True)
class Items:
    """The entries of each chunk of queries, sorted by block.

    A cell is a block of a selection head, number hs * C + block. An entry is a slot, number (t * Hs + hs) * n + slot.
    """

    step: int  # queries per chunk
    entries: Tensor  # (T * Hs * n,) int32, sorted by chunk, cell and query
    first_item: Tensor  # (chunks, Hs * C + 1) int32: cell c has items first_item[c] : first_item[c + 1]
    cell: Tensor  # (chunks, max_items) int32, cell of each item; Hs * C for unused items
    begin: Tensor  # (chunks, max_items) int32, first place of the item in `entries`
    end: Tensor  # (chunks, max_items) int32, last place of the item + 1

    def queries(self, chunk: int, total: int) -> slice:
        """Return the query rows of a chunk."""
        return slice(chunk * self.step, min((chunk + 1) * self.step, total))

    def tables(self, chunk: int, spans: NsaSpans) -> ItemTables:
        """Return the index of a chunk as a kernel argument."""
        places = (self.cell[chunk], self.begin[chunk], self.end[chunk])
        return ItemTables(self.entries, *places, spans.block_start, spans.last_key)


@triton.jit
def _first_above(p_sorted, value, size, bisections, STRICT: tl.constexpr):
    """Find by bisection the first of `size` ascending numbers that is >= value (> if STRICT)."""
    low, high = value * 0, value * 0 + size
    for _ in range(bisections):
        middle = low + (high - low) // 2
        found = tl.load(p_sorted + middle, mask=low < high, other=0)
        below = (found <= value) if STRICT else (found < value)
        low, high = tl.where((low < high) & below, middle + 1, low), tl.where((low < high) & (below == 0), middle, high)
    return low


@kernel_launcher
@triton.jit(do_not_specialize=["total", "heads", "slots", "blocks", "step", "none"])
def _cells_kernel(
    p_indices,  # (T, Hs, n) contiguous
    p_first_block,
    p_num_blocks,
    p_cells,  # (T * Hs * n,) integers, the cell of each entry plus those of earlier chunks; `none` for empty slots
    total,
    heads,
    slots,
    blocks,
    step,
    none,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < total
    t, head = entry // (heads * slots), entry // slots % heads
    index = tl.load(p_indices + entry, mask=inside, other=-1)
    seen = (index >= 0) & (index < tl.load(p_num_blocks + t, mask=inside, other=0))
    cell = (t // step * heads + head) * blocks + tl.load(p_first_block + t, mask=inside, other=0) + index
    tl.store(p_cells + entry, tl.where(seen, cell, none), mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=["total", "cells", "bisections"])
def _starts_kernel(p_sorted, p_starts, total, cells, bisections, BLOCK: tl.constexpr):
    """Find where the entries of each cell begin, (chunks * cells + 1,)."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_starts + cell, _first_above(p_sorted, cell, total, bisections, False), mask=cell <= cells)


@kernel_launcher
@triton.jit(do_not_specialize=["cells", "length"])
def _first_items_kernel(p_starts, p_first_item, cells, length, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    p_starts += chunk * cells
    p_first_item += chunk * (cells + 1)
    tl.store(p_first_item, 0)
    before = tl.full([], 0, tl.int32)
    for begin in range(0, cells, BLOCK):
        cell = begin + tl.arange(0, BLOCK)
        inside = cell < cells
        count = tl.load(p_starts + cell + 1, mask=inside, other=0) - tl.load(p_starts + cell, mask=inside, other=0)
        here = (count + length - 1) // length
        tl.store(p_first_item + cell + 1, before + tl.cumsum(here, 0), mask=inside)
        before += tl.sum(here, 0)


@kernel_launcher
@triton.jit(do_not_specialize=["cells", "items", "length", "bisections"])
def _items_kernel(
    p_starts, p_first_item, p_cell, p_begin, p_end, cells, items, length, bisections, BLOCK: tl.constexpr
):  # fmt: skip
    item, chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    p_starts += chunk * cells
    p_first_item += chunk * (cells + 1)
    cell = _first_above(p_first_item + 1, item, cells, bisections, True)
    known = cell < cells
    done = (item - tl.load(p_first_item + cell, mask=known, other=0)) * length
    begin = tl.load(p_starts + cell, mask=known, other=0) + tl.where(known, done, 0)
    end = tl.minimum(begin + length, tl.load(p_starts + cell + 1, mask=known, other=0))
    inside, at = item < items, chunk * items + item
    tl.store(p_cell + at, cell, mask=inside)
    tl.store(p_begin + at, begin, mask=inside)
    tl.store(p_end + at, end, mask=inside)


def items(indices: Tensor, spans: NsaSpans, step: int, length: int) -> Items:
    """Sort the entries of every `step` query rows by block, and cut them into items of at most `length` entries.

    Args:
        indices: (T, Hs, n) int32, T >= 1.
        spans: lengths of the sequences.
        step: queries per chunk.
        length: largest number of entries per item.
    """
    queries, heads, slots = indices.shape
    blocks, chunks, total = len(spans.block_start), -(-queries // step), indices.numel()
    cells = heads * blocks
    most = -(-(cells + step * heads * slots // length) // 4) * 4  # multiple of 16 bytes, which kernels are compiled for
    few = chunks * cells < 1 << 15  # then int16 suffices, with half the digits to sort
    cell_of = indices.new_empty(total, dtype=torch.int16 if few else torch.int32)
    starts = indices.new_empty(chunks * cells + 1)
    _cells_kernel[(-(-total // WIDTH),)](
        indices,
        spans.first_block,
        spans.num_blocks,
        cell_of,
        total=total,
        heads=heads,
        slots=slots,
        blocks=blocks,
        step=step,
        none=chunks * cells,
        BLOCK=WIDTH,
    )
    ordered, entries = cell_of.sort(stable=True)
    _starts_kernel[(-(-(chunks * cells + 1) // WIDTH),)](
        ordered,
        starts,
        total=total,
        cells=chunks * cells,
        bisections=total.bit_length(),
        BLOCK=WIDTH,
    )
    first_item = indices.new_empty(chunks, cells + 1)
    _first_items_kernel[(chunks,)](starts, first_item, cells=cells, length=length, BLOCK=WIDTH)
    cell, begin, end = indices.new_empty(3, chunks, most)
    _items_kernel[(-(-most // WIDTH), chunks)](
        starts,
        first_item,
        cell,
        begin,
        end,
        cells=cells,
        items=most,
        length=length,
        bisections=cells.bit_length(),
        BLOCK=WIDTH,
    )
    return Items(step, entries.int(), first_item, cell, begin, end)
