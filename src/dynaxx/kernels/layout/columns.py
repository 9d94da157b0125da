# SPDX-License-Identifier: Apache-2.0
"""Columns of a layout from its rows, for the backward pass over keys: sorted without a sort, and the same every time.

    entries of rows -> bits of each column's rows -> counts and bits before each word -> running sum -> places

The place of an entry within its column is the number of bits before its own, so programs write in any order and the
result does not depend on it. Partial and full blocks have bits of their own, because partial ones come first.

Legend: B batch, H heads, R rows of q blocks, C kv blocks, W words of 32 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launch_cache import record_or_replay, replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.runtime.recorder import Recording
from dynaxx.kernels.selection.triton.entries import running_sum
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import PerLayout, TransposedLayout
from dynaxx.layout.host import dense_size, dense_views

MAX_BYTES = 1 << 28  # of bits and counts; larger layouts are sorted
CLEARED, ENTRIES = 1024, 128  # words that a program clears; entries of a row at a time
SIZES = ["q_blocks", "kv_blocks", "num_words"]


@kernel_launcher
@triton.jit(do_not_specialize=["size"])
def _clear_kernel(p_words, size, BLOCK: tl.constexpr):
    o_w = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_words + o_w, tl.zeros([BLOCK], tl.int32), mask=o_w < size)


@triton.jit
def _ones(word):
    """Return the number of bits that are set in each int32."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _row(p_indptr, p_num_partial, i_program, q_blocks):
    """Return the head of a row, the row within it, its first entry, its number of entries, and of partial ones."""
    i_head = i_program // q_blocks
    i_row = (i_program % q_blocks).to(tl.int32)
    p_start = p_indptr + i_head * (q_blocks + 1) + i_row
    start = tl.load(p_start)
    return i_head, i_row, start, tl.load(p_start + 1) - start, tl.load(p_num_partial + i_program)


@kernel_launcher
@triton.jit(do_not_specialize=SIZES)
def _mark_columns_kernel(
    p_indptr,
    p_num_partial,
    p_indices,
    p_bits,  # (B, H, C, 2, W) int32, cleared: rows whose block is partial, and rows whose block is full
    q_blocks,
    kv_blocks,
    num_words,
    BLOCK: tl.constexpr,
):
    """Set the bit of a row in each column that it visits."""
    i_program = tl.program_id(0).to(tl.int64)
    i_head, i_row, start, count, partial = _row(p_indptr, p_num_partial, i_program, q_blocks)
    o_e = tl.arange(0, BLOCK)
    bit = o_e * 0 + 1 << i_row % 32
    for first in range(0, count, BLOCK):
        at = first + o_e
        col = tl.load(p_indices + start + at, mask=at < count, other=-1)
        inside = (col >= 0) & (col < kv_blocks)
        line = (i_head * kv_blocks + tl.where(inside, col, 0)) * 2 + (at >= partial).to(tl.int32)
        tl.atomic_or(p_bits + line * num_words + i_row // 32, bit, mask=inside, sem="relaxed")


@kernel_launcher
@triton.jit(do_not_specialize=SIZES)
def _count_columns_kernel(
    p_bits,
    p_before,  # (B, H, C, 2, W) int32: bits in the words before
    p_counts,  # (B, H, 1 + C) int32: 0, then the number of rows of each column
    p_partial,  # (B, H, C) int32
    q_blocks,
    kv_blocks,
    num_words,
    BLOCK_W: tl.constexpr,
):
    """Count the rows of a column, and those before each word; full blocks come after the partial ones."""
    i_program = tl.program_id(0).to(tl.int64)
    i_col = i_program % kv_blocks
    o_w = tl.arange(0, BLOCK_W)
    p_line = i_program * 2 * num_words + o_w
    partial = _ones(tl.load(p_bits + p_line, mask=o_w < num_words, other=0))
    full = _ones(tl.load(p_bits + p_line + num_words, mask=o_w < num_words, other=0))
    num_partial = tl.sum(partial, 0)
    tl.store(p_before + p_line, tl.cumsum(partial, 0) - partial, mask=o_w < num_words)
    tl.store(p_before + p_line + num_words, num_partial + tl.cumsum(full, 0) - full, mask=o_w < num_words)
    p_count = p_counts + i_program // kv_blocks * (kv_blocks + 1)
    tl.store(p_count, 0, mask=i_col == 0)
    tl.store(p_count + 1 + i_col, num_partial + tl.sum(full, 0))
    tl.store(p_partial + i_program, num_partial)


@kernel_launcher
@triton.jit(do_not_specialize=[*SIZES, "capacity"])
def _emit_columns_kernel(
    p_indptr,
    p_num_partial,
    p_indices,
    p_mask_ids,
    p_bits,
    p_before,
    p_q_indptr,  # (B, H, C + 1) int32
    p_q_indices,  # (capacity,) int32
    p_q_mask_ids,
    capacity,
    q_blocks,
    kv_blocks,
    num_words,
    BLOCK: tl.constexpr,
):
    """Write a row into each column that it visits, after the rows before it."""
    i_program = tl.program_id(0).to(tl.int64)
    i_head, i_row, start, count, partial = _row(p_indptr, p_num_partial, i_program, q_blocks)
    o_e = tl.arange(0, BLOCK)
    lower = (o_e * 0 + 1 << i_row % 32) - 1
    for first in range(0, count, BLOCK):
        at = first + o_e
        col = tl.load(p_indices + start + at, mask=at < count, other=-1)
        mask_id = tl.load(p_mask_ids + start + at, mask=at < count, other=0)
        inside = (col >= 0) & (col < kv_blocks)
        col = tl.where(inside, col, 0)
        word = ((i_head * kv_blocks + col) * 2 + (at >= partial).to(tl.int32)) * num_words + i_row // 32
        place = tl.load(p_q_indptr + i_head * (kv_blocks + 1) + col, mask=inside, other=0)
        place += tl.load(p_before + word, mask=inside, other=0)
        place += _ones(tl.load(p_bits + word, mask=inside, other=0) & lower)
        kept = inside & (place < capacity)
        tl.store(p_q_indices + place, o_e * 0 + i_row, mask=kept)
        tl.store(p_q_mask_ids + place, mask_id, mask=kept)


def serves(layout: BlockLayout) -> bool:
    """Return whether the layout's tensors are contiguous, and the bits and counts of its columns fit `MAX_BYTES`."""
    if not all(x.is_contiguous() for x in layout.tensors[:4]):
        return False
    lines = layout.layout_batch * layout.layout_heads * layout.kv_blocks
    return 0 < 16 * lines * -(-layout.q_blocks // 32) <= MAX_BYTES and layout.kv_indices.numel() > 0


def columns_of(layout: BlockLayout) -> TransposedLayout | None:
    """Return a layout's blocks grouped by kv block, as `layout.transpose` does; None if `serves` refuses."""
    replayed = _replayed.of(layout)
    columns = replay(replayed[0], layout.kernel_inputs, ()) if replayed else None
    if columns is None:
        if not serves(layout):
            return None
        recordings: list[Recording] = []
        columns = record_or_replay(_columns, layout, (), replayed=recordings)
        replayed |= enumerate(recordings)
    return TransposedLayout(*dense_views(columns[0], _shapes(layout)))


_replayed = PerLayout()


def _shapes(layout: BlockLayout) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors of a `TransposedLayout`."""
    heads, capacity = (layout.layout_batch, layout.layout_heads), layout.kv_indices.numel()
    return (*heads, 1 + layout.kv_blocks), (*heads, layout.kv_blocks), (capacity,), (capacity,)


def _columns(layout: BlockLayout) -> tuple[Tensor]:
    """Return the tensors of a `TransposedLayout` in one allocation."""
    heads, words = (layout.layout_batch, layout.layout_heads), -(-layout.q_blocks // 32)
    made = lambda *shape: torch.empty(shape, dtype=torch.int32, device=layout.device)
    bits, before = (made(*heads, layout.kv_blocks, 2, words) for _ in range(2))
    counts, numbers = made(*heads, 1 + layout.kv_blocks), made(dense_size(_shapes(layout)))
    q_indptr, partial, q_indices, q_masks = dense_views(numbers, _shapes(layout))
    rows, columns = heads[0] * heads[1] * layout.q_blocks, partial.numel()
    sizes = {"q_blocks": layout.q_blocks, "kv_blocks": layout.kv_blocks, "num_words": words}
    entries = layout.kv_indptr, layout.kv_num_partial, layout.kv_indices
    size = bits.numel()
    _clear_kernel[(triton.cdiv(size, CLEARED),)](bits, size=size, BLOCK=CLEARED)
    _mark_columns_kernel[(rows,)](*entries, bits, **sizes, BLOCK=ENTRIES)
    _count_columns_kernel[(columns,)](
        bits,
        before,
        counts,
        partial,
        **sizes,
        BLOCK_W=triton.next_power_of_2(words),
        num_warps=1,
    )
    running_sum(counts, q_indptr)
    _emit_columns_kernel[(rows,)](
        *entries,
        layout.kv_masks,
        bits,
        before,
        q_indptr,
        q_indices,
        q_masks,
        capacity=q_indices.numel(),
        **sizes,
        BLOCK=ENTRIES,
    )
    return (numbers,)
