# SPDX-License-Identifier: Apache-2.0
"""Rows of a layout from block indices: checked, sorted, and split into partial and full blocks.

    indices of a row -> bits of its blocks, counts -> running sum -> entries (`kernels.selection.triton.entries`)

One program per row sets a bit for each block that is named, so no sort is needed, and a block that is named twice is
found because its bit is set already. Indices out of range are never used as addresses.

Legend: B batch, H heads, R rows of q blocks, S slots, C kv blocks, W words of 32 blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launch_cache import record_or_replay, replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.runtime.recorder import Recording
from dynaxx.kernels.selection.triton.entries import emit_entries, running_sum
from dynaxx.kernels.selection.triton.row import EMPTY, GRID_SIZES, StaticEntries, causal_mask_id, grid_arguments
from dynaxx.layout import BlockGrid, ElementMasks
from dynaxx.layout.form import Form
from dynaxx.layout.host import dense_size, dense_views

MAX_COLUMNS = 1 << 14  # kv blocks; a row of them stays in registers
MAX_SLOTS_AT_ONCE = 1024


class IndexInputs(NamedTuple):
    """Inputs of layouts of equal form besides the indices, for `record_or_replay`."""

    grid: BlockGrid
    masks: ElementMasks  # the causal masks, on the device
    form: Form
    shapes: tuple[tuple[int, ...], ...]  # of `Rows`
    replayed: list[Recording]  # the recording of these launches, once there is one

    @property
    def kernel_inputs(self) -> tuple[Tensor, ...]:
        """Return tensors that every call reads; here, only the place of one that says which device it is."""
        return (self.masks.bands,)


@kernel_launcher
@triton.jit(do_not_specialize=["slots", *GRID_SIZES])
def _mark_rows_kernel(
    p_block_indices,  # (B, H, R, S) contiguous, any integer dtype
    p_bits,  # (B, H, R, W) int32: the blocks that are named
    p_counts,  # (B, H, 1 + R) int32: 0, then the number of visited blocks of each row
    p_partial,  # (B, H, R) int32
    p_refused,  # (B, H, R) int32: number of indices that are out of range or named before
    slots,
    seqlen_q,
    seqlen_k,
    q_blocks,
    kv_blocks,
    q_block,
    kv_block,
    first_distance,
    shift,
    CAUSAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Set the bits of a row's blocks, and count them."""
    i_program = tl.program_id(0).to(tl.int64)
    i_row = (i_program % q_blocks).to(tl.int32)
    row_distance = i_row * q_block + seqlen_k - seqlen_q
    num_words = (kv_blocks + 31) // 32
    p_words = p_bits + i_program * num_words
    o_w = tl.arange(0, BLOCK_W)
    tl.store(p_words + o_w, o_w * 0, mask=o_w < num_words)
    tl.debug_barrier()  # other threads of this program set bits in the words that this one cleared
    o_s = tl.arange(0, BLOCK_S)
    visited = o_s * 0
    partial = o_s * 0
    refused = o_s * 0
    for first in range(0, slots, BLOCK_S):
        index = tl.load(p_block_indices + i_program * slots + first + o_s, mask=first + o_s < slots, other=-1)
        inside = (index >= 0) & (index < kv_blocks)
        block = tl.where(inside, index, 0).to(tl.int32)
        bit = o_s * 0 + 1 << block % 32
        before = tl.atomic_or(p_words + block // 32, bit, mask=inside)
        new = inside & ((before & bit) == 0)
        mask_id = causal_mask_id(row_distance - block * kv_block, first_distance, shift, q_block, kv_block, CAUSAL)
        visited += (new & (mask_id != EMPTY)).to(tl.int32)
        partial += (new & (mask_id >= 0)).to(tl.int32)
        refused += ((index != -1) & ~new).to(tl.int32)
    p_count = p_counts + i_program // q_blocks * (q_blocks + 1)
    tl.store(p_count, 0, mask=i_row == 0)
    tl.store(p_count + 1 + i_row, tl.sum(visited, 0))
    tl.store(p_partial + i_program, tl.sum(partial, 0))
    tl.store(p_refused + i_program, tl.sum(refused, 0))


class Rows(NamedTuple):
    """The tensors of a layout made of indices."""

    kv_indptr: Tensor  # (B, H, R + 1) int32
    kv_num_partial: Tensor  # (B, H, R) int32
    kv_indices: Tensor  # (capacity,) int32
    kv_masks: Tensor  # (capacity,) int32
    refused: Tensor  # (B, H, R) int32: number of indices that were left out, out of range or named before


def index_inputs(block_indices: Tensor, grid: BlockGrid, masks: ElementMasks, form: Form) -> IndexInputs:
    """Return the inputs of layouts of indices of this form; `masks` are the causal masks, on the device."""
    batch, heads, rows, slots = block_indices.shape
    capacity, each_row = batch * heads * rows * min(slots, grid.kv_blocks), (batch, heads, rows)
    return IndexInputs(grid, masks, form, ((batch, heads, rows + 1), each_row, (capacity,), (capacity,), each_row), [])


def rows_of_indices(block_indices: Tensor, inputs: IndexInputs) -> Rows:
    """Return the rows of a layout that visits the named blocks, without reading anything back.

    Args:
        block_indices: (B, H, R, S), any integer dtype, in any order; -1 marks an empty slot. Indices that are out of
            range, and repeated ones, are left out and counted.
        inputs: lengths, block size and masks; at most `MAX_COLUMNS` kv blocks.
    """
    indices = (block_indices.contiguous(),)
    made = replay(inputs.replayed[0], inputs.kernel_inputs, indices) if inputs.replayed else None
    if made is None:
        made = record_or_replay(_rows, inputs, indices, replayed=inputs.replayed)
    return Rows(*dense_views(made[0], inputs.shapes))


def _rows(inputs: IndexInputs, block_indices: Tensor) -> tuple[Tensor]:
    """Return `Rows` in one allocation, which takes the host half the time of five."""
    grid, (batch, heads, rows, slots) = inputs.grid, block_indices.shape
    words = -(-grid.kv_blocks // 32)
    made = lambda *shape: torch.empty(shape, dtype=torch.int32, device=block_indices.device)
    bits, counts = made(batch, heads, rows, words), made(batch, heads, 1 + rows)
    numbers = made(dense_size(inputs.shapes))
    kv_indptr, partial, kv_indices, kv_masks, refused = dense_views(numbers, inputs.shapes)
    block_s = min(MAX_SLOTS_AT_ONCE, max(32, triton.next_power_of_2(slots)))
    _mark_rows_kernel[(batch * heads * rows,)](
        block_indices,
        bits,
        counts,
        partial,
        refused,
        slots=slots,
        **grid_arguments(grid),
        BLOCK_S=block_s,
        BLOCK_W=triton.next_power_of_2(words),
        num_warps=max(1, min(4, block_s // 128)),
    )
    running_sum(counts, kv_indptr)
    static = StaticEntries(None, counts, counts, inputs.masks)
    emit_entries(bits, kv_indptr, grid, static, (kv_indices, kv_masks))
    return (numbers,)
