# SPDX-License-Identifier: Apache-2.0
"""dq, dk and dv for Hopper in one pass over the kv blocks, in Gluon: 5 matrix products instead of 7 in two passes.

    producer warp (backward_produce)              k, v once; then tiles of 64 queries: q, do, lse, delta, mask
    2 consumers (backward_fused_consume)          64 keys each: dk, dv in registers; ds through shared memory
    both consumers -> TMA reduce-add              their columns of dq, to fp32 sums in global memory

A program computes a block of 128 keys of one kv head. Programs of other keys add to the same rows of dq in an order
that differs between runs, so the last bits of dq may differ. Kv heads are processed one after another, so that the sums
stay in L2: with two heads at a time the kernel is 8 % slower, with eight 29 %.
"""

from functools import partial
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.attention.hopper.backward_columns import SIZES, ColumnKernel, ColumnOutputs, column_or_part
from dynaxx.kernels.attention.hopper.backward_fused_consume import FusedBuffers, consume
from dynaxx.kernels.attention.hopper.backward_produce import ProducerArguments, fed_by, produce
from dynaxx.kernels.attention.hopper.config import columns_added, fused_stages, tile_width
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.primitives.hopper.column_parts import columns_of
from dynaxx.kernels.primitives.hopper.descriptors import gluon_rows
from dynaxx.kernels.primitives.hopper.signals import barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import LayoutRows, Parts
from dynaxx.layout import BlockLayout

CONSUMERS = gl.constexpr(2)


@kernel_launcher
@gluon.jit(do_not_specialize=[*SIZES, "last_first"])
def _sparse_attention_hopper_bwd_fused_kernel(
    do_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf for rows without weights
    p_delta,  # (B, Hq, q_blocks * Q_BLOCK) fp32, 0 for rows without weights
    tables,  # `LayoutTables` of the transposed layout
    capacity, num_masks, layout_stride_b, layout_stride_h,
    p_parts, p_sums, num_parts, limit, batch_copies, head_copies,
    seqlen_k, q_blocks, heads, kv_heads, group_size, pieces, together, ending, scale, scale_log2, cap_rate,
    sums_desc, last_first,
    Q_BLOCK: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_PARTS: gl.constexpr, AHEAD: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    KV_BLOCK: gl.constexpr = CONSUMERS * ROWS
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    column = column_or_part(
        gl.program_id(0), layout, parts, kv_blocks, heads, kv_heads, group_size, pieces, together, ending, HAS_PARTS
    )
    keys_there = seqlen_k - column.i_col * KV_BLOCK
    first_tile = column.first_head * q_blocks * (Q_BLOCK // ROWS)
    p_lse += column.first_head.to(gl.int64) * q_blocks * Q_BLOCK
    p_delta += column.first_head.to(gl.int64) * q_blocks * Q_BLOCK

    SLOTS: gl.constexpr = 2 if AHEAD else 4  # tiles of ds in shared memory, until both consumers have read them
    fed = fed_by(q_desc, do_desc, k_desc, v_desc, CONSUMERS, STAGES, CONSUMERS)
    ds_buffers = gl.allocate_shared_memory(
        q_desc.dtype, [SLOTS * CONSUMERS, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, 2)
    )
    LINES: gl.constexpr = sums_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = (HEAD_DIM + 31) // 32 * 32  # Triton 3.8 views whole buffers only, here by 32 columns
    dq_buffers = gl.allocate_shared_memory(
        gl.float32, [COLUMNS * ROWS // (LINES * 32), 1, 1, LINES, 32], sums_desc.layout
    )
    shared = FusedBuffers(sums_desc, ds_buffers, dq_buffers, barriers(1, CONSUMERS), barriers(SLOTS, CONSUMERS))
    outputs = ColumnOutputs(dk_desc, dv_desc, p_sums)
    given = ProducerArguments(q_desc, do_desc, k_desc, v_desc, fed, p_lse, p_delta)
    cut = keys_there < KV_BLOCK
    gl.warp_specialize([
        (consume, (
            outputs, shared, fed, layout, column, first_tile, keys_there, scale, scale_log2, cap_rate,
            CONSUMERS, 0, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS, AHEAD, HEAD_DIM, HEAD_DIM_V,
        )),
        (consume, (
            outputs, shared, fed, layout, column, first_tile, keys_there, scale, scale_log2, cap_rate,
            CONSUMERS, 1, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS, AHEAD, HEAD_DIM, HEAD_DIM_V,
        )),
        (produce, (
            given, layout, column, q_blocks, 0,
            CONSUMERS, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS, AHEAD, cut, last_first,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _others(layout: BlockLayout, q: Tensor, v: Tensor, sums: Tensor, last_first: int = 0) -> dict[str, Any]:
    width, columns = tile_width(q.shape[3]), columns_of(q.shape[3])
    return {
        "sums_desc": gluon_rows(sums, columns_added(columns) * 2, 32),
        "last_first": last_first,
        "HEAD_DIM": columns,
        "HEAD_DIM_V": columns_of(v.shape[3]),
        "STAGES": fused_stages(width),
        "AHEAD": width == 64,  # then registers suffice to compute the scores of the next tile ahead
        "maxnreg": 168,
    }


FUSED = ColumnKernel(
    _sparse_attention_hopper_bwd_fused_kernel, _others
)  # for kv blocks of 128; adds dq / scale to the sums
FUSED_LAST_FIRST = FUSED._replace(others=partial(_others, last_first=1))  # makes programs of a head share queries in L2
