# SPDX-License-Identifier: Apache-2.0
"""The dq kernel: a program per row of the layout visits its kv blocks. See `backward`."""

import triton
import triton.language as tl

from dynaxx.kernels.attention.triton.backward_rows import (
    cap_scores,
    in_registers,
    load_lse,
    row_values,
    weights_of,
)
from dynaxx.kernels.primitives.triton.bias import head_bias, lse_without_bias
from dynaxx.kernels.primitives.triton.tiles import (
    PARTIAL,
    entry_of_step,
    head_rows,
    load_tile,
    row_entries,
    row_of,
    steps_of_pass,
    store_rows,
    tile_of_pass,
    tile_positions,
)
from dynaxx.kernels.primitives.triton.visible import load_band, masks_of, where_shown, where_visible
from dynaxx.kernels.runtime.arguments import RUNTIME_SIZES
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import WHOLE, LayoutRows, Parts, entries_of, query_tile, store_part
from dynaxx.kernels.schedule.split import SPLIT_SIZES


@triton.jit
def _layout_entry(i_step, row, masks, MASKING: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load a step's block, and the id and band of its mask; past the end, those of the last step."""
    _, _, last = steps_of_pass(row, MASKING)
    entry, _ = entry_of_step(tl.minimum(i_step, last), row, MASKING, KV_BLOCK, BLOCK_N)
    block = tl.load(row.tables.p_indices + entry)
    mask_id, lo, hi = -1, 1, 0
    if MASKING == PARTIAL:
        mask_id = tl.load(row.tables.p_mask_ids + entry)
        lo, hi = load_band(masks, mask_id)
    return block, mask_id, lo, hi


@triton.jit
def _accumulate_dq(
    dq,  # [BLOCK_M, BLOCK_D] fp32
    entry,  # result of `_layout_entry` for the first tile, under TMA
    b_q,  # [BLOCK_M, BLOCK_D]
    b_do,  # [BLOCK_M, BLOCK_E]
    lse,  # [BLOCK_M]
    delta,  # [BLOCK_M]
    part_q,  # offset of the tile in the q block
    k,  # `HeadRows`
    v,
    scale,
    cap,
    row,  # `LayoutRow`
    masks,  # `Masks`
    bias,  # `HeadBias`, if BIAS
    MASKING: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Add the tiles of a pass to dq; return dq, and the result of `_layout_entry` for the tile after them."""
    BLOCK_D: tl.constexpr = b_q.shape[1]
    BLOCK_E: tl.constexpr = b_do.shape[1]
    begin, end, _ = steps_of_pass(row, MASKING)
    for i_step in tl.range(begin, end, disable_licm=TMA):  # keeps matrix descriptors of resident tiles out of registers
        if TMA:  # a tile lies in one block, and its layout entry was loaded one tile ahead
            block, mask_id, lo, hi = entry
            entry = _layout_entry(i_step + 1, row, masks, MASKING, KV_BLOCK, BLOCK_N)
            _, part_k = entry_of_step(i_step, row, MASKING, KV_BLOCK, BLOCK_N)
            first_k = block * KV_BLOCK + part_k
            offsets = tl.arange(0, BLOCK_N)
            is_full = i_step >= row.partial_tiles
        else:
            first, count, i_tile, is_full = tile_of_pass(i_step - begin, row, MASKING)
            first_k, offsets, inner_k, mask_id = tile_positions(
                row.tables, first, count, i_tile, k.seqlen, KV_BLOCK, BLOCK_N, MASKING
            )
        b_k = load_tile(k, first_k, offsets, D, BLOCK_D, BLOCK_N, MASKING == PARTIAL, TMA)
        b_v = load_tile(v, first_k, offsets, E, BLOCK_E, BLOCK_N, MASKING == PARTIAL, TMA)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores, slope = cap_scores(scores, cap, CAPPED)
        if BIAS == "none":
            weights = weights_of(scores, lse[:, None], scale, b_k.dtype == tl.float32)
        else:
            pos_q, pos_k = part_q + tl.arange(0, b_q.shape[0]), first_k + offsets
            pair_lse = lse_without_bias(
                lse[:, None], bias, pos_q[:, None], pos_k[None, :], b_k.dtype == tl.float32, BIAS
            )
            weights = weights_of(scores, pair_lse, scale, b_k.dtype == tl.float32)
        if MASKING == PARTIAL:
            inner_q = part_q + tl.arange(0, b_q.shape[0])
            if TMA:
                weights = where_shown(
                    weights, 0.0, mask_id, lo, hi, is_full, masks, inner_q, part_k, first_k, k.seqlen, Q_BLOCK, KV_BLOCK
                )
            else:
                weights = where_visible(
                    weights, 0.0, mask_id, is_full, masks, inner_q, inner_k, first_k, offsets, k.seqlen,
                    Q_BLOCK, KV_BLOCK,
                )  # fmt: skip
        dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        ds = weights * (dp - delta[:, None]) * slope
        dq = tl.dot(ds.to(b_k.dtype), b_k, dq, input_precision="ieee")
    return dq, entry


@kernel_launcher
@triton.jit(do_not_specialize=[*RUNTIME_SIZES, *SPLIT_SIZES, "stride_dlb", "stride_dlh", "stride_dln"])
def _sparse_attention_bwd_dq_kernel(
    do_rows,  # pointers; under TMA, descriptors of (B, heads, seqlen, head_dim)
    q_rows,
    k_rows,
    v_rows,
    out_rows,
    p_lse,  # (B, Hq, N) contiguous, fp32, base e
    p_dlse,
    p_values,  # (B, Hq, padded_q, 2) contiguous, fp32: lse and delta from `row_values`, for the dkv kernel
    p_dq,  # (B, N, Hq, D) contiguous
    p_order,
    tables,  # `LayoutTables`
    capacity,
    num_masks,
    layout_stride_b,
    layout_stride_h,
    p_parts,
    p_sums,  # (slots, Q_BLOCK, D) fp32
    num_parts,
    limit,
    batch_copies,
    head_copies,
    seqlen_q,
    padded_q,
    seqlen_k,
    batch,
    q_heads,
    group_size,
    span,
    scale,
    cap,
    do_strides,  # `Strides`
    out_strides,
    stride_dlb,
    stride_dlh,
    stride_dln,
    q_strides,
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
    TMA: tl.constexpr,
    ORDERED: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    HELD: tl.constexpr,  # keep q and do in registers
    BIAS: tl.constexpr,  # "none", "slopes" or "table"
):
    """Compute dq of a tile of queries of one head."""
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    tile = query_tile(p_order, layout, parts, seqlen_q, batch, q_heads, span, Q_BLOCK, BLOCK_M, ORDERED, HAS_PARTS)
    i_b, i_h, slot = tile.i_b, tile.i_h, tile.slot
    part_q = tile.part_q
    first_q = (tile.i_row * Q_BLOCK + part_q).to(tl.int64)
    o_q = tl.arange(0, BLOCK_M)
    pos_q = first_q + o_q

    i_hk = i_h // group_size
    q = head_rows(q_rows, q_strides, i_b, i_h, seqlen_q, TMA)
    do = head_rows(do_rows, do_strides, i_b, i_h, seqlen_q, TMA)
    out = head_rows(out_rows, out_strides, i_b, i_h, seqlen_q, TMA)
    k = head_rows(k_rows, k_strides, i_b, i_hk, seqlen_k, TMA)
    v = head_rows(v_rows, v_strides, i_b, i_hk, seqlen_k, TMA)
    # Small loads come first, because outside of loops Triton waits for TMA tiles where they are requested.
    head = i_b * q_heads + i_h
    p_dlse += i_b * stride_dlb + i_h * stride_dlh
    lse, dlse = load_lse(p_lse + head * seqlen_q, p_dlse, pos_q, stride_dln, seqlen_q)
    q_blocks = tl.cdiv(seqlen_q, Q_BLOCK)
    start, partial, total = row_entries(layout, tile.layout_head, tile.i_row, q_blocks)
    if HAS_PARTS:
        slot, start, partial, total = entries_of(slot, start, partial, total, tile.first, tile.last, limit)
    row = row_of(layout, start, partial, total, seqlen_k, KV_BLOCK, BLOCK_N)
    masks = masks_of(layout)
    bias = 0
    if BIAS != "none":
        bias = head_bias(p_bias, bias_strides, i_b, i_h, tile.i_row * Q_BLOCK, seqlen_q, seqlen_k, BIAS)
    entry = (0, -1, 1, 0)
    if TMA and total > 0:
        entry = _layout_entry(0, row, masks, PARTIAL, KV_BLOCK, BLOCK_N)
    b_q = load_tile(q, first_q, o_q, D, BLOCK_D, BLOCK_M, True, TMA)
    b_do = load_tile(do, first_q, o_q, E, BLOCK_E, BLOCK_M, True, TMA)
    b_out = load_tile(out, first_q, o_q, E, BLOCK_E, BLOCK_M, True, TMA)

    EXACT: tl.constexpr = b_q.dtype == tl.float32
    if HELD:
        b_q, wide_do = in_registers(b_q).to(b_q.dtype), in_registers(b_do)
        b_do = wide_do.to(b_do.dtype)
    else:
        wide_do = b_do.to(tl.float32)
    lse, delta = row_values(lse, dlse, wide_do, b_out, EXACT)
    own = tl.where(tile.slot == WHOLE, padded_q, 0)  # all parts of a row would write the same numbers
    p_values += (head * padded_q + pos_q) * 2
    tl.store(p_values, lse, mask=pos_q < own)
    tl.store(p_values + 1, delta, mask=pos_q < own)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKING in tl.static_range(2):
        dq, entry = _accumulate_dq(
            dq, entry, b_q, b_do, lse, delta, part_q, k, v, scale, cap, row, masks, bias,
            MASKING, D, E, Q_BLOCK, KV_BLOCK, BLOCK_N, CAPPED, TMA, BIAS,
        )  # fmt: skip
    if HAS_PARTS:
        store_part(p_sums, slot, dq, part_q + o_q, Q_BLOCK, D, BLOCK_D)
        pos_q = tl.where(slot == WHOLE, pos_q, -1)
    p_dq += (i_b * seqlen_q * q_heads + i_h) * D
    store_rows(p_dq, dq * scale, pos_q, q_heads * D, seqlen_q, D, BLOCK_D)
