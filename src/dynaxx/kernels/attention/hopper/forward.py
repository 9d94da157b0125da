# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention forward for Hopper, in Gluon: persistent programs with a producer warp and 1 or 2 consumers.

    producer warp (forward_produce)       layout -> q, k, v by TMA into shared memory, masks as numbers; a row ahead
    consumer warpgroup (forward_consume)  64 query rows: q k.T -> softmax -> p v, sums in registers -> out, lse

Each buffer of q, k and v has a full and an empty barrier. With q blocks of 128, two consumers share a q block. With q
blocks of 64, they process two heads of a group that share a layout; otherwise there is one consumer. With two
consumers, blocks of 64 keys are processed in pairs. Masked blocks come first, so that only they pay for masks. TMA
clips at the end of each sequence: a tail reads zeros, never a neighbour's data, and an invalid index reads nothing.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.attention.hopper.config import forward_stages, forward_step, tile_width
from dynaxx.kernels.attention.hopper.forward_consume import ROWS, ConsumerArguments, arrivals, consume
from dynaxx.kernels.attention.hopper.forward_lazy_softmax import unchecked
from dynaxx.kernels.attention.hopper.forward_order import Schedule, lines_together, row_lengths
from dynaxx.kernels.attention.hopper.forward_produce import (
    FIELDS,
    ROW_FIELDS,
    ForwardBuffers,
    ForwardInputs,
    ForwardSizes,
    produce,
)
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.column_parts import columns_of
from dynaxx.kernels.primitives.hopper.descriptors import dense_rows, gluon_rows, score_factors
from dynaxx.kernels.primitives.hopper.signals import NUMBERS, barriers
from dynaxx.kernels.primitives.sinks import include_sinks
from dynaxx.kernels.runtime.arguments import layout_arguments, order_argument, positive_scale
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import LayoutRows, Parts
from dynaxx.kernels.schedule.split import SPLIT_SIZES, no_split, split_programs, split_rows
from dynaxx.kernels.schedule.split_sums import merge_parts, of_columns
from dynaxx.kernels.schedule.waves import sharing
from dynaxx.layout import BlockLayout

PERSISTENT = 16  # parts per multiprocessor's share, because persistent programs differ by one part at most
SIZES = ["capacity", "num_masks", "seqlen_q", "seqlen_k", "batch", "q_heads", "group_size", "together"]


@kernel_launcher
@gluon.jit(do_not_specialize=[*SIZES, *SPLIT_SIZES])
def _sparse_attention_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, p_out, p_lse, p_order,
    tables,  # `LayoutTables`
    capacity, num_masks, layout_stride_b, layout_stride_h,
    p_parts, p_sums, p_sums_lse, num_parts, limit, batch_copies, head_copies,
    seqlen_q, seqlen_k, batch, q_heads, group_size, together, scale_log2, cap_rate,
    CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ORDERED: gl.constexpr,
    HAS_PARTS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    BLOCKS: gl.constexpr = (STEP + KV_BLOCK - 1) // KV_BLOCK
    SLOTS: gl.constexpr = 2 if q_desc.block_type.shape[3] <= 128 else 1  # rows of q that fit into shared memory
    part_units = num_parts * batch_copies * head_copies
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(dtype, [SLOTS * CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_E: gl.constexpr = out_desc.block_type.shape[3]
    tiles: gl.constexpr = STAGES * BLOCKS
    k_buffers = gl.allocate_shared_memory(dtype, [tiles * (D // COLUMNS), 1, 1, KEYS, COLUMNS], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [tiles * (BLOCK_E // COLUMNS), 1, 1, KEYS, COLUMNS], v_desc.layout)
    row_numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * ROW_FIELDS, 1], NUMBERS)
    step_numbers = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS * FIELDS, 1], NUMBERS)
    q_full = barriers(SLOTS, 1)
    q_empty = barriers(SLOTS, CONSUMERS)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, CONSUMERS * arrivals(CONSUMERS, D, dtype))
    v_full = barriers(STAGES, 1)
    v_empty = barriers(STAGES, CONSUMERS * arrivals(CONSUMERS, D, dtype))
    flags, judged = row_numbers, q_full
    if unchecked(dtype):
        flags = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], NUMBERS)
        judged = barriers(1, CONSUMERS)

    HEADS: gl.constexpr = (CONSUMERS - 1) * STEP_HEADS + 1  # heads per program
    all_units = part_units + (seqlen_q + Q_BLOCK - 1) // Q_BLOCK * batch * (q_heads // HEADS)
    buffers = ForwardBuffers(
        q_buffers, k_buffers, v_buffers, row_numbers, step_numbers, q_full, q_empty, k_full, k_empty, v_full, v_empty
    )
    given = ForwardInputs(q_desc, k_desc, v_desc, p_order, p_lse, p_sums_lse)
    results = ConsumerArguments(
        out_desc, p_out, buffers, p_lse, tables.p_bits, p_sums, p_sums_lse, seqlen_q, q_heads, scale_log2, cap_rate
    )
    sizes = ForwardSizes(seqlen_q, seqlen_k, q_heads, group_size, together)
    units = (all_units, flags, judged)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                units, results, 0, 2, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V, E,
            )),
            (consume, (
                units, results, 1, 2, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V, E,
            )),
            (produce, (
                units, given, buffers, layout, parts, sizes,
                2, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, ORDERED, HAS_PARTS,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                units, results, 0, 1, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V, E,
            )),
            (produce, (
                units, given, buffers, layout, parts, sizes,
                1, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, ORDERED, HAS_PARTS,
            )),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, like `kernels.attention.reference.attention_forward`."""
    found, lse = _without_sinks(q, k, v, layout, scale, softcap, out)
    if sinks is not None:
        found, lse = include_sinks(found, lse, sinks, layout)
    return (found if out is None or found is out else out.copy_(found)), lse


def _without_sinks(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, softcap: float | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse; out is a new tensor if the given one has strides that the kernels cannot write."""
    batch, seqlen_q, q_heads = q.shape[:3]
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    waves, left = sharing()
    heads = _heads_of_a_program(layout, q_heads, k.shape[2])
    split = split_rows(layout, batch, q_heads, PERSISTENT // waves or 1, heads)
    if out is None or split is not None or _out_width(q, v) > 128 or dense_rows(out) is not out:
        out = q.new_empty(*q.shape[:3], v.shape[3])
    if out.numel() == 0:
        return out, lse
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    q, scale = positive_scale(q, scale)
    if split is None:
        made = 2 if out.is_contiguous() else 1
        record_or_replay(_start_forward, layout, (q, k, v, out, lse), scale, softcap, waves, left, made=made)
    else:
        rows, width = heads * layout.block_size[0], _out_width(q, v)
        sums, sums_lse = split.places(q, rows, width), split.places(q, rows)
        places = split.to(p_sums=sums, p_sums_lse=sums_lse)
        record_or_replay(_start_forward, layout, (q, k, v, out, lse), scale, softcap, waves, left, made=2, split=places)
        merge_parts(of_columns(sums, v.shape[3]), sums_lse, out, lse, split, layout, heads)
    return out, lse


def _out_width(q: Tensor, v: Tensor) -> int:
    """Return the columns of a tile of v and out: those of q, or at 256 columns possibly fewer, if v needs fewer."""
    width = tile_width(q.shape[3])
    return tile_width(v.shape[3]) if width == 256 else width


def _columns_summed(head_dim_v: int, width: int) -> int:
    """Return the columns of p v: those of v's parts, or a whole tile where a part of 16 columns gains nothing."""
    columns = columns_of(head_dim_v)
    return width if columns == 80 else columns


def _heads_of_a_program(layout: BlockLayout, q_heads: int, kv_heads: int) -> int:
    """Return 2 for q blocks of 64 if the heads of a group share a layout and are even in number, else 1."""
    return 2 if layout.block_size[0] == 64 and layout.layout_heads == 1 and (q_heads // kv_heads) % 2 == 0 else 1


def _start_forward(
    layout: BlockLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    waves: int,
    left: int,
    split: dict[str, Any] | None = None,
) -> None:
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    q_block, kv_block = layout.block_size
    width, out_width = tile_width(head_dim), _out_width(q, v)
    heads = _heads_of_a_program(layout, q_heads, kv_heads)
    consumers = heads * q_block // 64
    programs = 2 if consumers == 1 and width <= 128 else 1  # per multiprocessor, at once
    step = forward_step(width, kv_block, consumers)
    split = split or {**no_split(lse), "p_sums_lse": lse}
    lines = batch * q_heads // heads
    units = layout.q_blocks * lines + split_programs(split)
    order, ordered = order_argument(layout)
    most = max(1, processors(q.device) - left) * programs * waves
    schedule = Schedule(
        lengths=row_lengths(layout),
        lines=lines,
        lines_of_kv_head=max(1, q_heads // kv_heads // heads),
        kv_bytes=seqlen_k * (head_dim + v.shape[3]) * k.element_size(),
        q_block=q_block,
        programs=most,
        beside=programs,
    )
    _sparse_attention_hopper_fwd_kernel[(min(units, most),)](
        gluon_rows(q, 64, width),
        gluon_rows(k, min(kv_block, step), 64),
        gluon_rows(v, min(kv_block, step), 64),
        gluon_rows(out, 64, out_width),
        out,
        lse,
        order,
        *layout_arguments(layout),
        **split,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        q_heads=q_heads,
        group_size=q_heads // kv_heads,
        together=lines_together(schedule),
        **score_factors(scale, softcap),
        HEAD_DIM=columns_of(head_dim),
        HEAD_DIM_V=_columns_summed(v.shape[3], out_width),
        E=v.shape[3] if width == 256 else width,
        CONSUMERS=consumers,
        STEP_ROWS=64 if q_block == 128 else 0,
        STEP_HEADS=heads - 1,
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        STEP=step,
        STAGES=forward_stages(width, consumers),
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        ORDERED=ordered,
        num_warps=4,
        maxnreg=128 if programs == 2 else 168,
    )
