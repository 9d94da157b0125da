# SPDX-License-Identifier: Apache-2.0
"""dk and dv for head_dim 256 on Hopper, in Gluon.

    producer warp (backward_produce)      k, v once; then tiles of 64 queries: q, do, lse, delta, mask
    dv consumer, dk consumer              see `backward_dkv_head_dim_256_consume`

A program computes 64 keys of one kv head. A kv block of 128 keys has two neighbouring programs, which read the same
tiles.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.attention.hopper.backward_columns import SIZES, ColumnKernel, column_or_part
from dynaxx.kernels.attention.hopper.backward_dkv_head_dim_256_consume import (
    LINES,
    LINES_LAYOUT,
    SLOTS,
    SharedWeights,
    consume_dk,
    consume_dv,
)
from dynaxx.kernels.attention.hopper.backward_produce import ProducerArguments, fed_by, produce
from dynaxx.kernels.attention.hopper.config import BACKWARD_STAGES
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.primitives.hopper.signals import barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import LayoutRows, Parts
from dynaxx.layout import BlockLayout

CONSUMERS = gl.constexpr(2)


@kernel_launcher
@gluon.jit(do_not_specialize=SIZES)
def _sparse_attention_hopper_bwd_dkv_head_dim_256_kernel(
    do_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf for rows without weights
    p_delta,  # (B, Hq, q_blocks * Q_BLOCK) fp32, 0 for rows without weights
    tables,  # `LayoutTables` of the transposed layout
    capacity, num_masks, layout_stride_b, layout_stride_h,
    p_parts, p_sums, num_parts, limit, batch_copies, head_copies,
    seqlen_k, q_blocks, heads, kv_heads, group_size, pieces, together, ending, scale, scale_log2, cap_rate,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = KV_BLOCK // ROWS  # programs per kv block
    first_key = gl.program_id(0) % PIECES * ROWS
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    column = column_or_part(
        gl.program_id(0) // PIECES, layout, parts, kv_blocks, heads, kv_heads, group_size, pieces, together, ending,
        HAS_PARTS,
    )  # fmt: skip
    p_lse += column.first_head.to(gl.int64) * q_blocks * Q_BLOCK
    p_delta += column.first_head.to(gl.int64) * q_blocks * Q_BLOCK

    fed = fed_by(q_desc, do_desc, k_desc, v_desc, 1, STAGES, CONSUMERS)
    weight_buffers = gl.allocate_shared_memory(gl.float32, [SLOTS, LINES, 32], LINES_LAYOUT)
    weights = SharedWeights(weight_buffers, barriers(SLOTS, 1), barriers(SLOTS, 1))
    given = ProducerArguments(q_desc, do_desc, k_desc, v_desc, fed, p_lse, p_delta)
    gl.warp_specialize([
        (consume_dv, (
            dv_desc, p_sums, fed, weights, layout, column, first_key, scale_log2, cap_rate,
            Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS,
        )),
        (consume_dk, (
            dk_desc, p_sums, fed, weights, layout, column, first_key, scale, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS
        )),
        (produce, (given, layout, column, q_blocks, first_key, CONSUMERS, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _others(layout: BlockLayout, q: Tensor, v: Tensor, sums: None) -> dict[str, Any]:
    return {"KV_BLOCK": layout.block_size[1], "STAGES": BACKWARD_STAGES, "maxnreg": 168}


WIDE = ColumnKernel(_sparse_attention_hopper_bwd_dkv_head_dim_256_kernel, _others, keys=64)
