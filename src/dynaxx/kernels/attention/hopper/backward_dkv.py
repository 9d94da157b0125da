# SPDX-License-Identifier: Apache-2.0
"""dk and dv for Hopper, in Gluon.

    producer warp (backward_produce)      k, v once; then tiles of 64 queries: q, do, lse, delta, mask
    consumer per 64 keys (backward_consume)   scores.T = k q.T -> weights -> dv += w do; dk += ds q

A program computes one kv block of one kv head. Each buffer has a full and an empty barrier. lse (base 2) and delta are
padded to whole q blocks. lse is inf for missing queries and for queries that see nothing, so they contribute nothing.
"""

import math
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.attention.hopper.backward_columns import SIZES, ColumnKernel, ColumnOutputs, column_or_part
from dynaxx.kernels.attention.hopper.backward_consume import consume
from dynaxx.kernels.attention.hopper.backward_dkv_head_dim_256 import WIDE
from dynaxx.kernels.attention.hopper.backward_produce import ProducerArguments, fed_by, produce
from dynaxx.kernels.attention.hopper.backward_rows import BackwardCall
from dynaxx.kernels.attention.hopper.config import BACKWARD_STAGES, tile_width
from dynaxx.kernels.attention.hopper.pieces import Columns, backward_pieces
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.column_parts import columns_of
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import LayoutRows, Parts
from dynaxx.layout import BlockLayout


@kernel_launcher
@gluon.jit(do_not_specialize=SIZES)
def _sparse_attention_hopper_bwd_dkv_kernel(
    do_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf for rows without weights
    p_delta,  # (B, Hq, q_blocks * Q_BLOCK) fp32, 0 for rows without weights
    tables,  # `LayoutTables` of the transposed layout
    capacity, num_masks, layout_stride_b, layout_stride_h,
    p_parts, p_sums, num_parts, limit, batch_copies, head_copies,
    seqlen_k, q_blocks, heads, kv_heads, group_size, pieces, together, ending, scale, scale_log2, cap_rate,
    CONSUMERS: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_PARTS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    column = column_or_part(
        gl.program_id(0), layout, parts, kv_blocks, heads, kv_heads, group_size, pieces, together, ending, HAS_PARTS
    )
    p_lse += column.first_head.to(gl.int64) * q_blocks * Q_BLOCK
    p_delta += column.first_head.to(gl.int64) * q_blocks * Q_BLOCK

    fed = fed_by(q_desc, do_desc, k_desc, v_desc, CONSUMERS, STAGES, CONSUMERS)
    outputs = ColumnOutputs(dk_desc, dv_desc, p_sums)
    given = ProducerArguments(q_desc, do_desc, k_desc, v_desc, fed, p_lse, p_delta)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                outputs, fed, layout, column, scale, scale_log2, cap_rate, 0, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V,
            )),
            (consume, (
                outputs, fed, layout, column, scale, scale_log2, cap_rate, 1, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V,
            )),
            (produce, (given, layout, column, q_blocks, 0, 2, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                outputs, fed, layout, column, scale, scale_log2, cap_rate, 0, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V,
            )),
            (produce, (given, layout, column, q_blocks, 0, 1, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def _others(layout: BlockLayout, q: Tensor, v: Tensor, sums: None) -> dict[str, Any]:
    kv_block = layout.block_size[1]
    return {
        "CONSUMERS": kv_block // 64,
        "KV_BLOCK": kv_block,
        "STAGES": BACKWARD_STAGES,
        "HEAD_DIM": columns_of(q.shape[3]),
        "HEAD_DIM_V": columns_of(v.shape[3]),
        "maxnreg": 168 if kv_block == 128 else 128,
    }


REACH = 40  # blocks
NARROW = ColumnKernel(_sparse_attention_hopper_bwd_dkv_kernel, _others)


def backward_dkv(call: BackwardCall) -> tuple[Tensor, Tensor]:
    """Return (dk, dv), contiguous."""
    kernel = WIDE if tile_width(call.q.shape[3]) == 256 else NARROW
    return kernel.gradients(call, group_pieces(call.q, call.k, call.layout, False))


def group_pieces(q: Tensor, k: Tensor, layout: BlockLayout, one_pass: bool) -> int:
    """Return the number of pieces into which a group is divided."""
    batch, seqlen_q, q_heads, head_dim = q.shape
    entries = layout.kv_indices.numel() // (layout.layout_batch * layout.layout_heads)
    kv_block, under_causal = layout.block_size[1], max(1, layout.q_blocks * layout.kv_blocks // 2)
    paired = kv_block == 64 and tile_width(head_dim) <= 128  # two programs fit on a multiprocessor
    columns = Columns(
        kv_blocks=layout.kv_blocks,
        batch=batch,
        kv_heads=k.shape[2],
        group_size=q_heads // k.shape[2],
        seqlen_q=seqlen_q,
        head_dim=head_dim,
        share=-1 if entries > 1.5 * under_causal else max(0, round(math.log2(under_causal / max(1, entries)))),
        reach=known_reach(layout),
        places=processors(k.device) * (2 if paired else 1),
        one_pass=one_pass,
    )
    return backward_pieces(columns)


def known_reach(layout: BlockLayout) -> int | None:
    """Return the largest distance of visited blocks from the diagonal, if it is known to be at most `REACH` blocks."""
    host, rows = layout.host, layout.layout_batch * layout.layout_heads * layout.q_blocks
    if host is None or layout.block_size[0] != layout.block_size[1]:
        return None
    return host.reach if host.kv_indices.numel() <= rows * (2 * REACH + 1) and host.reach <= REACH else None
