# SPDX-License-Identifier: Apache-2.0
"""dq for Hopper, in Gluon, in a separate pass over the rows of a layout.

    producer warp                                 layout -> k, v in tiles of 64 keys, with their masks; q, do once
    consumer per 64 queries (backward_dq_consume)   scores -> weights -> ds -> dq += ds k

q and do stay in shared memory, dq in registers. With q blocks of 128, two consumers process the halves of a q block.
With q blocks of 64, they process two heads of a group that share a layout; otherwise there is one consumer. At head_dim
256, shared memory holds two tiles of k and one of v.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.attention.hopper.backward_dq_consume import FIELDS, DqBuffers, DqRow, consume
from dynaxx.kernels.attention.hopper.backward_rows import BackwardCall
from dynaxx.kernels.attention.hopper.config import backward_dq_registers, backward_dq_stages, tile_width
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.attention.hopper.forward_produce import band_of
from dynaxx.kernels.compat import barrier, tma_load
from dynaxx.kernels.primitives.hopper.column_parts import columns_of
from dynaxx.kernels.primitives.hopper.descriptors import gluon_rows, score_factors
from dynaxx.kernels.primitives.hopper.parts import read_row, row_or_part
from dynaxx.kernels.primitives.hopper.signals import NUMBERS, barriers, send_number
from dynaxx.kernels.runtime.arguments import layout_arguments, order_argument
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import LayoutRows, Parts
from dynaxx.kernels.schedule.split import SPLIT_SIZES, no_split, split_programs, split_rows
from dynaxx.kernels.schedule.split_sums import of_columns, sum_parts
from dynaxx.layout import BlockLayout

SIZES = ["capacity", "num_masks", "seqlen_q", "seqlen_k", "batch", "q_heads", "group_size"]


@gluon.jit
def _produce(
    given, buffers, layout, row, seqlen_k, group_size,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """Load q and do of each consumer, then the row.tiles of the row.

    If seqlen_k cuts the last full block (`tail`), that block comes first, because it needs a mask. Then follow the
    partial blocks, then full blocks without masks.
    """
    q_desc, do_desc, k_desc, v_desc = given
    numbers = buffers.numbers
    SPLIT: gl.constexpr = KV_BLOCK // ROWS
    mbarrier.expect(buffers.q_full.index(0), 2 * CONSUMERS * q_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [row.i_b, row.i_h + u * STEP_HEADS, row.i_row * Q_BLOCK + u * STEP_ROWS, 0]
        tma_load(q_desc, at, buffers.q_full.index(0), buffers.q.index(u))
        tma_load(do_desc, at, buffers.q_full.index(0), buffers.do.index(u))
    i_hk = row.i_h // group_size
    for i in range(row.tiles):
        stage = i % K_STAGES
        position = i // SPLIT
        part = i % SPLIT * ROWS
        entry = row.start + gl.where((row.tail == 1) & (position == 0), row.count - 1, position - row.tail)
        first_key = gl.load(layout.tables.p_indices + entry) * KV_BLOCK + part
        mbarrier.wait(buffers.k_empty.index(stage), ((i // K_STAGES) & 1) ^ 1)
        if i < row.masked:
            lo, hi, mask_id = band_of(layout, gl.load(layout.tables.p_mask_ids + entry))
            # distances are query - key, and the tile's keys begin at `part`
            send_number(numbers, stage * FIELDS, gl.where(lo > hi, 1, lo + part))
            send_number(numbers, stage * FIELDS + 1, gl.where(lo > hi, 0, hi + part))
            send_number(numbers, stage * FIELDS + 2, seqlen_k - first_key)
            send_number(numbers, stage * FIELDS + 3, mask_id)
            barrier()
        mbarrier.expect(buffers.k_full.index(stage), k_desc.block_type.nbytes)
        tma_load(k_desc, [row.i_b, i_hk, first_key, 0], buffers.k_full.index(stage), buffers.k.index(stage))
        v_stage = i % V_STAGES
        mbarrier.wait(buffers.v_empty.index(v_stage), ((i // V_STAGES) & 1) ^ 1)
        mbarrier.expect(buffers.v_full.index(v_stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [row.i_b, i_hk, first_key, 0], buffers.v_full.index(v_stage), buffers.v.index(v_stage))


@kernel_launcher
@gluon.jit(do_not_specialize=[*SIZES, *SPLIT_SIZES])
def _sparse_attention_hopper_bwd_dq_kernel(
    do_desc, q_desc, k_desc, v_desc, dq_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf for rows without weights
    p_delta,  # (B, Hq, q_blocks * Q_BLOCK) fp32, 0 for rows without weights
    p_order,
    tables,  # `LayoutTables`
    capacity, num_masks, layout_stride_b, layout_stride_h,
    p_parts, p_sums, num_parts, limit, batch_copies, head_copies,
    seqlen_q, seqlen_k, batch, q_heads, group_size, scale, scale_log2, cap_rate,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    ORDERED: gl.constexpr, HAS_PARTS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    SPLIT: gl.constexpr = KV_BLOCK // ROWS
    HEADS: gl.constexpr = (CONSUMERS - 1) * STEP_HEADS + 1
    units = q_heads // HEADS
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    i_unit = gl.maximum(gl.program_id(0) - num_parts * batch_copies * head_copies, 0)  # parts come first
    i_h, i_b, rank = i_unit % units * HEADS, i_unit // units % batch, i_unit // (units * batch)
    unit = row_or_part(gl.program_id(0), i_b, i_h, parts, q_blocks, units, HEADS, HAS_PARTS)
    i_row, start, count, partial = read_row(unit, rank, p_order, layout, limit, q_blocks, ORDERED, HAS_PARTS)
    part = -1
    if HAS_PARTS:
        part = gl.where(unit.is_part, gl.program_id(0), -1)
    tail = gl.where((count > partial) & (seqlen_k % KV_BLOCK != 0), 1, 0)
    masked = (tail + partial) * SPLIT
    tiles = count * SPLIT

    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, ROWS, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, ROWS, D], v_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [K_STAGES * FIELDS, 1], NUMBERS)
    q_full = barriers(1, 1)
    k_full = barriers(K_STAGES, 1)
    k_empty = barriers(K_STAGES, CONSUMERS)
    v_full = barriers(V_STAGES, 1)
    v_empty = barriers(V_STAGES, CONSUMERS)
    buffers = DqBuffers(q_buffers, do_buffers, k_buffers, v_buffers, numbers, q_full, k_full, k_empty, v_full, v_empty)
    row = DqRow(unit.i_b, unit.i_h, i_row, start, count, tail, masked, tiles, part)
    given = (q_desc, do_desc, k_desc, v_desc)
    outputs = (dq_desc, p_sums)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                outputs, buffers, row, p_lse, p_delta, tables.p_bits, q_blocks, q_heads, scale, scale_log2, cap_rate,
                0, 2, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V,
            )),
            (consume, (
                outputs, buffers, row, p_lse, p_delta, tables.p_bits, q_blocks, q_heads, scale, scale_log2, cap_rate,
                1, 2, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V,
            )),
            (_produce, (
                given, buffers, layout, row, seqlen_k, group_size,
                2, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                outputs, buffers, row, p_lse, p_delta, tables.p_bits, q_blocks, q_heads, scale, scale_log2, cap_rate,
                0, 1, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V,
            )),
            (_produce, (
                given, buffers, layout, row, seqlen_k, group_size,
                1, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES,
            )),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def backward_dq(call: BackwardCall) -> Tensor:
    """Return dq, contiguous."""
    do, q, k, v, rows, layout, scale, softcap = call
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    split = split_rows(layout, q.shape[0], q.shape[2])
    tensors = (do, q, k, v, dq, rows.lse, rows.delta)
    if split is None:
        record_or_replay(_start_dq, layout, tensors, scale, softcap)
        return dq
    sums = split.places(q, layout.block_size[0], tile_width(q.shape[3]))
    record_or_replay(_start_dq, layout, tensors, scale, softcap, split=split.to(p_sums=sums))
    sum_parts(of_columns(sums, q.shape[3]), dq, split, layout, layout.block_size[0], scale)
    return dq


def _start_dq(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    softcap: float | None,
    split: dict[str, Any] | None = None,
) -> None:
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    q_block, kv_block = layout.block_size
    shared = split is None and layout.layout_heads == 1 and q_heads // kv_heads % 2 == 0
    heads = 2 if q_block == 64 and shared else 1
    consumers = heads * q_block // 64
    width = tile_width(head_dim)
    stages = backward_dq_stages(width, consumers)
    order, ordered = order_argument(layout)
    split = split or no_split(delta)
    programs = layout.q_blocks * batch * q_heads // heads + split_programs(split)
    _sparse_attention_hopper_bwd_dq_kernel[(programs,)](
        *(gluon_rows(x, 64, width) for x in (do, q, k, v, dq)),
        lse,
        delta,
        order,
        *layout_arguments(layout),
        **split,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        q_heads=q_heads,
        group_size=q_heads // kv_heads,
        scale=scale,
        **score_factors(scale, softcap),
        CONSUMERS=consumers,
        STEP_ROWS=64 if q_block == 128 else 0,
        STEP_HEADS=heads - 1,
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        ORDERED=ordered,
        K_STAGES=stages[0],
        V_STAGES=stages[1],
        HEAD_DIM=columns_of(head_dim),
        HEAD_DIM_V=columns_of(v.shape[3]),
        num_warps=4,
        maxnreg=backward_dq_registers(width, consumers),
    )
