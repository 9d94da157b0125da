# SPDX-License-Identifier: Apache-2.0
"""Write selected blocks as entries of a `BlockLayout`, each row at the position given by the running sum of counts.

Legend: B batch, H selections per batch entry, Hq q heads, R rows of q blocks, C kv blocks, W words of 32 blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.selection.triton.row import (
    EMPTY,
    FULL,
    GRID_SIZES,
    StaticEntries,
    causal_mask_id,
    columns,
    grid_arguments,
    static_arguments,
    static_row,
    warps,
)
from dynaxx.layout import BlockGrid

COUNTS_AT_ONCE, COUNT_WARPS = 4096, 16  # counts per step, and warps, of the running sum


@kernel_launcher
@triton.jit(do_not_specialize=["size"])
def _running_sum_kernel(p_counts, p_sums, size, BLOCK: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    before = 0
    for first in range(0, size, BLOCK):
        inside = first + o_n < size
        counts = tl.load(p_counts + first + o_n, mask=inside, other=0)
        tl.store(p_sums + first + o_n, before + tl.cumsum(counts, 0), mask=inside)
        before += tl.sum(counts, 0)


def running_sum(counts: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `layout.entries.running_sum` of (B, Hq, 1 + R) int32 counts, in one launch that a recording can repeat."""
    sums = torch.empty_like(counts) if out is None else out
    _running_sum_kernel[(1,)](counts, sums, size=counts.numel(), BLOCK=COUNTS_AT_ONCE, num_warps=COUNT_WARPS)
    return sums


@kernel_launcher
@triton.jit(do_not_specialize=["capacity", "serves", *GRID_SIZES])
def _emit_entries_kernel(
    p_bits,
    p_row_indptr,  # (B, Hq, R + 1) int32: position of each row's entries
    p_indptr,
    p_indices,
    p_mask_ids,
    p_same,
    p_places,  # (C,) int32, if PLACED
    p_out_indices,  # (capacity,) int32
    p_out_mask_ids,
    p_out_places,
    capacity,
    serves,
    seqlen_q,
    seqlen_k,
    q_blocks,
    kv_blocks,
    q_block,
    kv_block,
    first_distance,
    shift,
    HAS_STATIC: tl.constexpr,
    CAUSAL: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_choice = tl.program_id(0).to(tl.int64)
    i_row = (i_choice % q_blocks).to(tl.int32)
    o_c = tl.arange(0, BLOCK_C)
    row_distance = i_row * q_block + seqlen_k - seqlen_q
    own, _ = static_row(
        p_indptr, p_indices, p_mask_ids, p_same, i_row, o_c, row_distance, first_distance, shift, q_block, kv_block,
        HAS_STATIC, CAUSAL,
    )  # fmt: skip
    num_words = (kv_blocks + 31) // 32
    word = tl.load(p_bits + i_choice * num_words + o_c // 32, mask=o_c < kv_blocks, other=0)
    causal = causal_mask_id(row_distance - o_c * kv_block, first_distance, shift, q_block, kv_block, CAUSAL)
    mask_id = tl.where(((word >> (o_c % 32)) & 1) != 0, causal, own)
    partial = (mask_id >= 0).to(tl.int32)
    full = (mask_id == FULL).to(tl.int32)
    slot = tl.where(partial == 1, tl.cumsum(partial, 0) - 1, tl.sum(partial, 0) + tl.cumsum(full, 0) - 1)
    i_bh = i_choice // q_blocks
    place = o_c
    if PLACED:
        place = tl.load(p_places + o_c, mask=o_c < kv_blocks, other=0)
    for i_head in range(i_bh * serves, i_bh * serves + serves):
        start = tl.load(p_row_indptr + i_head * (q_blocks + 1) + i_row)
        kept = (mask_id != EMPTY) & (start + slot < capacity)
        tl.store(p_out_indices + start + slot, o_c, mask=kept)
        tl.store(p_out_mask_ids + start + slot, mask_id, mask=kept)
        if PLACED:
            tl.store(p_out_places + start + slot, place, mask=kept)


def emit_entries(
    bits: Tensor,
    kv_indptr: Tensor,
    grid: BlockGrid,
    static: StaticEntries,
    out: tuple[Tensor, Tensor],
    places: Tensor | None = None,
) -> Tensor | None:
    """Write the entries of a layout; return places[kv_indices], (capacity,) int32, if there are places.

    Args:
        bits: (B, H, R, W) int32, the selected blocks; H divides Hq.
        kv_indptr: (B, Hq, R + 1) int32, position of each row's entries, including those of the pattern.
        grid: lengths and block sizes.
        static: entries of the pattern.
        out: kv_indices and kv_masks, each (capacity,) int32 for the largest number of entries.
        places: (C,) int32, where the blocks of keys in pages are; None for keys in order.
    """
    indices, mask_ids = out
    placed = None if places is None else torch.empty_like(indices)
    block_c = columns(grid.kv_blocks)
    batch, choices = bits.shape[:2]
    _emit_entries_kernel[(batch * choices * grid.q_blocks,)](
        bits,
        kv_indptr,
        *static_arguments(static, kv_indptr),
        kv_indptr if places is None else places,
        indices,
        mask_ids,
        indices if placed is None else placed,
        capacity=indices.numel(),
        serves=kv_indptr.shape[1] // choices,
        **grid_arguments(grid),
        HAS_STATIC=static.layout is not None,
        PLACED=places is not None,
        BLOCK_C=block_c,
        num_warps=warps(block_c),
    )
    return placed
