# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention forward in Triton: one program per tile of BLOCK_M queries of one head.

    q tile (resident) -> partial blocks of the row, masked -> full blocks, unmasked -> out, lse
                         k, v tiles stream in; running maximum, sum and output in registers, in base 2

In bf16, a long forward computes the weights of full blocks relative to the scores of the partial blocks, without new
maxima. If these weights leave the range of numbers, a second launch repeats the tile with maxima; for all other tiles
it ends at once. `forward_row` contains the loop over a row.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.attention.triton.config import TMA_BLOCK, forward_loop, forward_span, forward_tiles, value_parts
from dynaxx.kernels.attention.triton.forward_row import attend, attend_ahead, out_of_range
from dynaxx.kernels.device import gpu_of, padded
from dynaxx.kernels.primitives.sinks import include_sinks
from dynaxx.kernels.primitives.triton.bias import bias_arguments, head_bias
from dynaxx.kernels.primitives.triton.tiles import (
    PARTIAL,
    entry_of_step,
    head_rows,
    load_tile,
    row_entries,
    row_of,
    store_rows,
)
from dynaxx.kernels.primitives.triton.visible import masks_of
from dynaxx.kernels.runtime.arguments import (
    RUNTIME_SIZES,
    layout_arguments,
    order_argument,
    positive_scale,
    steps_by_tma,
    strides_of,
    tile_rows,
    unit_stride,
)
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import WHOLE, LayoutRows, Parts, entries_of, query_tile, store_part
from dynaxx.kernels.schedule.split import SPLIT_SIZES, no_split, split_programs, split_rows
from dynaxx.kernels.schedule.split_sums import merge_parts
from dynaxx.layout import BlockLayout

ALL = tl.constexpr(2)
AGAIN = tl.constexpr(3)
MANY_TILES = 2048  # query tiles; with fewer, a second launch costs the host more than maxima cost the GPU


@kernel_launcher
@triton.jit(do_not_specialize=[*RUNTIME_SIZES, *SPLIT_SIZES])
def _sparse_attention_fwd_kernel(
    q_rows,  # pointers; under TMA, descriptors of (B, Hq, N, D), (B, Hk, M, D) and (B, Hk, M, E)
    k_rows,
    v_rows,
    p_out,  # (B, N, Hq, E) contiguous
    p_lse,  # (B, Hq, N) contiguous, fp32
    p_order,
    tables,  # `LayoutTables`
    capacity,
    num_masks,
    layout_stride_b,
    layout_stride_h,
    p_parts,
    p_sums,  # (slots, Q_BLOCK, E) fp32
    p_sums_lse,  # (slots, Q_BLOCK) fp32
    num_parts,
    limit,
    batch_copies,
    head_copies,
    seqlen_q,
    seqlen_k,
    batch,
    q_heads,
    group_size,
    span,
    scale,
    cap,
    q_strides,  # `Strides`
    k_strides,
    v_strides,
    p_bias,  # (B, Hq) or (B, Hq, N + M - 1) fp32, if BIAS
    bias_strides,  # `BiasStrides`
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    ORDERED: tl.constexpr,
    TMA: tl.constexpr,
    LOOP: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,  # programs per tile; each computes E columns of out
    MAXIMA: tl.constexpr,  # ALL: of all tiles; PARTIAL: of partial tiles only, and lse is NaN for rows that need AGAIN
    BIAS: tl.constexpr,  # "none", "slopes" or "table"
):
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    tile = query_tile(p_order, layout, parts, seqlen_q, batch, q_heads, span, Q_BLOCK, BLOCK_M, ORDERED, HAS_PARTS)
    i_b, i_h, slot = tile.i_b, tile.i_h, tile.slot
    inner_q = tile.part_q + tl.arange(0, BLOCK_M)
    first_q = (tile.i_row * Q_BLOCK + tile.part_q).to(tl.int64)
    pos_q = first_q + tl.arange(0, BLOCK_M)

    p_lse += (i_b * q_heads + i_h) * seqlen_q
    if MAXIMA == AGAIN:
        lse = tl.load(p_lse + pos_q, mask=pos_q < seqlen_q, other=0.0)
        if tl.sum((lse != lse).to(tl.int32)) == 0:
            return
    q_blocks = tl.cdiv(seqlen_q, Q_BLOCK)
    start, partial, total = row_entries(layout, tile.layout_head, tile.i_row, q_blocks)
    if HAS_PARTS:
        slot, start, partial, total = entries_of(slot, start, partial, total, tile.first, tile.last, limit)

    i_hk = i_h // group_size
    q = head_rows(q_rows, q_strides, i_b, i_h, seqlen_q, TMA)
    k = head_rows(k_rows, k_strides, i_b, i_hk, seqlen_k, TMA)
    if V_PARTS > 1:
        v = head_rows(v_rows, v_strides, i_b, i_hk, seqlen_k, TMA, tl.program_id(1) * E)
    else:
        v = head_rows(v_rows, v_strides, i_b, i_hk, seqlen_k, TMA)
    masks = masks_of(layout)
    bias = 0
    if BIAS != "none":
        bias = head_bias(p_bias, bias_strides, i_b, i_h, tile.i_row * Q_BLOCK, seqlen_q, seqlen_k, BIAS)
    b_q = load_tile(q, first_q, tl.arange(0, BLOCK_M), D, BLOCK_D, BLOCK_M, True, TMA)

    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row = row_of(layout, start, partial, total, seqlen_k, KV_BLOCK, BLOCK_N)
    steps = row.partial_tiles + row.left + row.whole
    if LOOP == "in turn":
        for MASKING in tl.static_range(2):
            acc, row_max, row_sum = attend(
                acc, row_max, row_sum, b_q, inner_q, k, v, scale, cap, row, masks, bias,
                MASKING, D, E, Q_BLOCK, KV_BLOCK, BLOCK_N, CAPPED, TMA, BIAS,
            )  # fmt: skip
    elif steps > 0:
        entry, part = entry_of_step(0, row, PARTIAL, KV_BLOCK, BLOCK_N)
        first_k = tl.load(tables.p_indices + entry) * KV_BLOCK + part
        entry, _ = entry_of_step(tl.minimum(1, steps - 1), row, PARTIAL, KV_BLOCK, BLOCK_N)
        next_block = tl.load(tables.p_indices + entry)
        if LOOP == "ahead" and BLOCK_E != BLOCK_N:
            # Not zeros: Triton would keep a constant in the layouts of both products and wait for the second one
            # twice, and ptxas would then serialize the matrix instructions of the whole kernel.
            acc = tl.dot(tl.zeros([BLOCK_M, 16], b_q.dtype), tl.zeros([16, BLOCK_E], b_q.dtype))
        b_k = load_tile(k, first_k, tl.arange(0, BLOCK_N), D, BLOCK_D, BLOCK_N, True, True)
        scores = tl.dot(b_q, tl.trans(b_k))
        for MASKING in tl.static_range(2):
            acc, scores, first_k, next_block, row_max, row_sum = attend_ahead(
                acc, scores, first_k, next_block, row_max, row_sum, b_q, inner_q, k, v, scale, cap, row, masks, bias,
                MASKING, Q_BLOCK, KV_BLOCK, CAPPED, LOOP == "overlapped", MAXIMA == PARTIAL and LOOP == "ahead", BIAS,
            )  # fmt: skip

    if MAXIMA == PARTIAL:
        lost = out_of_range(acc, row_sum)
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    acc = acc / row_sum[:, None] if b_q.dtype == tl.float32 else acc * (1.0 / row_sum)[:, None]
    lse = tl.where(empty, float("-inf"), row_max * (scale if BIAS == "none" else 1.0) + tl.log(row_sum))
    if MAXIMA == PARTIAL:
        lse = tl.where(lost, float("nan"), lse)
    if HAS_PARTS:
        store_part(p_sums, slot, acc, inner_q, Q_BLOCK, E, BLOCK_E)
        at = tl.maximum(slot, 0).to(tl.int64) * Q_BLOCK + inner_q
        tl.store(p_sums_lse + at, lse, mask=inner_q < tl.where(slot >= 0, Q_BLOCK, 0))
        pos_q = tl.where(slot == WHOLE, pos_q, seqlen_q)
    tl.store(p_lse + pos_q, lse, mask=pos_q < seqlen_q)
    p_out += (i_b * seqlen_q * q_heads + i_h) * (V_PARTS * E)
    if V_PARTS > 1:
        p_out += tl.program_id(1) * E
    store_rows(p_out, acc, pos_q, q_heads * (V_PARTS * E), seqlen_q, E, BLOCK_E)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, like `kernels.attention.reference.attention_forward`; products of fp32 are in full fp32."""
    found, lse = _without_sinks(q, k, v, layout, scale, softcap, bias)
    if sinks is not None:
        found, lse = include_sinks(found, lse, sinks, layout)
    return (found if out is None else out.copy_(found)), lse


def _without_sinks(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, softcap: float | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, q_heads = q.shape[:3]
    out = q.new_empty(batch, seqlen_q, q_heads, v.shape[3])
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q, scale = positive_scale(q, scale)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    split = split_rows(layout, batch, q_heads)
    if split is None:
        for maxima in (ALL.value,) if bias is not None else _launches(q, v, layout, softcap):
            record_or_replay(_start_forward, layout, (q, k, v, bias, out, lse), scale, softcap, maxima, made=2)
        return out, lse
    rows = layout.block_size[0]
    sums, sums_lse = split.places(q, rows, v.shape[3]), split.places(q, rows)
    places = split.to(p_sums=sums, p_sums_lse=sums_lse)
    record_or_replay(_start_forward, layout, (q, k, v, bias, out, lse), scale, softcap, ALL.value, made=2, split=places)
    merge_parts(sums, sums_lse, out, lse, split, layout)
    return out, lse


def _launches(q: Tensor, v: Tensor, layout: BlockLayout, softcap: float | None) -> tuple[int, ...]:
    """Return for each launch which tiles use maxima."""
    many = layout.q_blocks * q.shape[0] * q.shape[2] >= MANY_TILES
    if not many or q.dtype != torch.bfloat16 or softcap is not None:
        return (ALL.value,)
    ahead = max(q.shape[3], v.shape[3]) <= 128 and min(layout.block_size) >= 128 and gpu_of(q.device).has_wgmma
    return (PARTIAL.value, AGAIN.value) if ahead else (ALL.value,)


def _start_forward(
    layout: BlockLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    maxima: int,
    split: dict[str, Any] | None = None,
) -> None:
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    tma = min(layout.block_size) >= TMA_BLOCK and steps_by_tma(q, k, v)
    parts = 1 if split else value_parts(head_dim_v, layout.block_size, tma)
    head_dim_v //= parts
    tiles = forward_tiles(gpu_of(q.device), q.dtype, head_dim, head_dim_v, layout.block_size, tma)
    order, ordered = order_argument(layout)
    split = split or {**no_split(lse), "p_sums_lse": lse}
    programs = (layout.q_blocks * batch * q_heads + split_programs(split)) * (layout.block_size[0] // tiles.block_m)
    _sparse_attention_fwd_kernel[(programs, parts)](
        tile_rows(q, tiles.block_m) if tma else q,
        tile_rows(k, tiles.block_n) if tma else k,
        tile_rows(v, tiles.block_n, padded(head_dim_v)) if tma else v,
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
        span=forward_span(q_heads // kv_heads, tiles),
        scale=scale,
        cap=1.0 if softcap is None else softcap / scale,
        q_strides=strides_of(q),
        k_strides=strides_of(k),
        v_strides=strides_of(v),
        **bias_arguments(bias),
        D=head_dim,
        E=head_dim_v,
        BLOCK_D=padded(head_dim),
        BLOCK_E=padded(head_dim_v),
        Q_BLOCK=layout.block_size[0],
        KV_BLOCK=layout.block_size[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        CAPPED=softcap is not None,
        ORDERED=ordered and maxima != AGAIN.value,
        TMA=tma,
        LOOP=forward_loop(gpu_of(q.device), tiles, head_dim, head_dim_v, tma),
        V_PARTS=parts,
        MAXIMA=maxima,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **gpu_of(q.device).limit_registers(tiles.max_registers),
    )
