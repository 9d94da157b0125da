# SPDX-License-Identifier: Apache-2.0
"""Sums of the partial gradients of items and entries in selected attention: dk, dv and dq.

    dk, dv per item -> sum over the items of a block -> dk, dv        dq per entry -> sum over a query's slots -> dq

Sums have a fixed order and use no atomics, so every run gives the same bits. Names and shapes are those of
`nsa.gather`.
"""

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.key_items import Items
from dynaxx.trained.nsa.kernels.gpu.rows import gather_rows, scatter_rows
from dynaxx.trained.nsa.spans import NsaSpans

SUM_ROWS = 16


@kernel_launcher
@triton.jit(do_not_specialize=["blocks", "heads_per_kv"])
def _selected_sum_items_kernel(
    p_items,  # (items, KV_BLOCK, DIM) fp32
    p_grad,  # (M, Hk, DIM)
    p_first_item,
    p_block_start,
    p_block_end,
    blocks,
    heads_per_kv,
    grad_strides,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD: tl.constexpr,  # add to the contents of p_grad
):
    """Sum the items of each block over the selection heads of its kv head."""
    i_block, i_head, i_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n = i_part * BLOCK_N + tl.arange(0, BLOCK_N)
    every = o_n >= 0
    row = tl.load(p_block_start + i_block) + o_n
    inside = row < tl.load(p_block_end + i_block)
    total = 0
    for i_select in range(heads_per_kv):
        cell = (i_head * heads_per_kv + i_select) * blocks + i_block
        total += tl.load(p_first_item + cell + 1) - tl.load(p_first_item + cell)
    if (not ADD) | (total > 0):
        acc = tl.zeros([BLOCK_N, BLOCK_DIM], tl.float32)
        if ADD:
            acc += gather_rows(p_grad, row, o_n * 0 + i_head, grad_strides, inside, DIM, BLOCK_DIM)
        for i_select in range(heads_per_kv):
            cell = (i_head * heads_per_kv + i_select) * blocks + i_block
            for item in range(tl.load(p_first_item + cell), tl.load(p_first_item + cell + 1)):
                acc += gather_rows(p_items, o_n * 0 + item, o_n, (KV_BLOCK * DIM, DIM), every, DIM, BLOCK_DIM)
        scatter_rows(p_grad, acc, row, o_n * 0 + i_head, grad_strides, inside, DIM, BLOCK_DIM)


@kernel_launcher
@triton.jit(do_not_specialize=["first_query", "q_heads", "slots", "rows", "group_size"])
def _selected_sum_entries_kernel(
    p_entries_dq,  # (entries of these queries, SPLIT, group, D)
    p_indices,  # (T, Hs, n)
    p_num_blocks,
    p_dq,  # (T, Hq, D)
    first_query,
    q_heads,
    slots,
    rows,
    group_size,
    dq_strides,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum the partial dq of each query and q head over its entries."""
    heads = q_heads // group_size
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    h, t = row % q_heads, first_query + row // q_heads
    base = row // q_heads * heads + h // group_size
    seen = tl.load(p_num_blocks + t, mask=inside, other=0)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for slot in range(0, slots):
        p_index = p_indices + (t.to(tl.int64) * heads + h // group_size) * slots + slot
        index = tl.load(p_index, mask=inside, other=-1)
        for i_part in tl.static_range(SPLIT):
            place = (base * slots + slot).to(tl.int64) * SPLIT + i_part
            valid = (index >= 0) & (index < seen)
            acc += gather_rows(p_entries_dq, place, h % group_size, (group_size * D, D), valid, D, BLOCK_D).to(
                tl.float32
            )
    scatter_rows(p_dq, acc, t, h, dq_strides, inside, D, BLOCK_D)


def sum_items(items: Tensor, grad: Tensor, index: Items, chunk: int, heads: int, spans: NsaSpans) -> None:
    """Sum the items of a chunk, fp32 (items, block, dim), into `grad` (M, Hk, dim); add after the first chunk."""
    kv_heads, size = grad.shape[1], items.shape[1]
    _selected_sum_items_kernel[(len(spans.block_start), kv_heads, size // SUM_ROWS)](
        items,
        grad,
        index.first_item[chunk],
        spans.block_start,
        spans.block_end,
        blocks=len(spans.block_start),
        heads_per_kv=heads // kv_heads,
        grad_strides=packed_strides_of(grad),
        DIM=grad.shape[2],
        BLOCK_DIM=padded(grad.shape[2]),
        KV_BLOCK=size,
        BLOCK_N=SUM_ROWS,
        ADD=chunk > 0,
        num_warps=4,
    )


def sum_entries(entries: Tensor, dq: Tensor, indices: Tensor, queries: slice, spans: NsaSpans) -> None:
    """Sum the entries of each query, (entries of these queries, parts of a block, group, D), into its rows of dq."""
    slots = indices.shape[2]
    rows, split, group_size = (queries.stop - queries.start) * dq.shape[1], entries.shape[1], entries.shape[2]
    _selected_sum_entries_kernel[(-(-rows // SUM_ROWS),)](
        entries,
        indices,
        spans.num_blocks,
        dq,
        first_query=queries.start,
        q_heads=dq.shape[1],
        slots=slots,
        rows=rows,
        group_size=group_size,
        dq_strides=packed_strides_of(dq),
        D=dq.shape[2],
        BLOCK_D=padded(dq.shape[2]),
        SPLIT=split,
        ROWS=SUM_ROWS,
        num_warps=4,
    )
