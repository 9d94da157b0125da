# SPDX-License-Identifier: Apache-2.0
"""The dk and dv kernel: a program per kv block visits its column, one head after another. See `backward`."""

import triton
import triton.language as tl

from dynaxx.kernels.attention.triton.backward_rows import (
    cap_scores,
    load_row_values,
    weights_of,
)
from dynaxx.kernels.primitives.prefetch import prefetched
from dynaxx.kernels.primitives.triton.bias import head_bias, lse_without_bias
from dynaxx.kernels.primitives.triton.tiles import (
    BOUNDS,
    block_ahead,
    head_rows,
    load_tile,
    row_entries,
    store_rows,
    tile_positions,
)
from dynaxx.kernels.primitives.triton.visible import in_block, load_band, masks_of, shown_by_bits, visible_elements
from dynaxx.kernels.runtime.arguments import RUNTIME_SIZES
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import (
    WHOLE,
    LayoutRows,
    Parts,
    entries_of,
    part_of,
    started_tile,
    store_part,
)
from dynaxx.kernels.schedule.split import SPLIT_SIZES


@triton.jit
def _load_rows(head, start, TILE: tl.constexpr, BLOCK_DIM: tl.constexpr, PREFETCH: tl.constexpr):
    """Load [TILE, BLOCK_DIM] rows of `HeadRows`, from row `start`, by TMA, started PREFETCH iterations ahead."""
    rows = prefetched(head.source.load([head.i_b.to(tl.int32), head.i_h.to(tl.int32), start.to(tl.int32), 0]), PREFETCH)
    return rows.reshape(TILE, BLOCK_DIM)


@triton.jit
def _accumulate_dkv(
    dk,  # [BLOCK_N, BLOCK_D] fp32
    dv,  # [BLOCK_N, BLOCK_E] fp32
    b_k,  # [BLOCK_N, BLOCK_D]
    b_v,  # [BLOCK_N, BLOCK_E]
    part_k,  # offset of the tile in the kv block
    q,  # `HeadRows`
    do,
    row_values,  # a pointer for this q head; under TMA, a descriptor for all heads
    scale,
    cap,
    tables,  # `LayoutTables`
    first,
    count,
    masks,  # `Masks`
    bias,  # `HeadBias`, if BIAS
    MASKED: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
    NARROW: tl.constexpr,
    STAGED: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Add the gradients of `count` q blocks from entry `first`; queries past the end have lse = inf and add nothing."""
    BLOCK_N: tl.constexpr = b_k.shape[0]
    BLOCK_D: tl.constexpr = b_k.shape[1]
    BLOCK_E: tl.constexpr = b_v.shape[1]
    EARLY: tl.constexpr = NARROW or (STAGED and not MASKED)  # compute the product for dp before the softmax
    tiles = tl.cdiv(count * Q_BLOCK, BLOCK_M)
    if TMA:  # a tile lies in one block, and its layout entry is loaded one tile ahead
        SPLIT: tl.constexpr = Q_BLOCK // BLOCK_M
        next_block = block_ahead(tables.p_indices, first, 0, tiles, SPLIT)
        if MASKED:
            next_mask_id = block_ahead(tables.p_mask_ids, first, 0, tiles, SPLIT)
            next_lo, next_hi = load_band(masks, next_mask_id)
    for i_tile in tl.range(0, tiles, disable_licm=TMA):  # keeps matrix descriptors of resident tiles out of registers
        if TMA:
            offsets = tl.arange(0, BLOCK_M)
            part_q = i_tile % SPLIT * BLOCK_M
            start = next_block * Q_BLOCK + part_q
            next_block = block_ahead(tables.p_indices, first, i_tile + 1, tiles, SPLIT)
            if MASKED:
                mask_id, lo, hi = next_mask_id, next_lo, next_hi
                next_mask_id = block_ahead(tables.p_mask_ids, first, i_tile + 1, tiles, SPLIT)
                next_lo, next_hi = load_band(masks, next_mask_id)
        else:
            start, offsets, inner_q, mask_id = tile_positions(
                tables, first, count, i_tile, q.seqlen, Q_BLOCK, BLOCK_M, BOUNDS
            )
        if STAGED and not MASKED:  # q has three buffers and do two; Triton waits for each where it is loaded
            b_q = _load_rows(q, start, BLOCK_M, BLOCK_D, 2)
            scores = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            b_do = _load_rows(do, start, BLOCK_M, BLOCK_E, 1)
            dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
            pairs = prefetched(row_values.load([q.i_b.to(tl.int32), q.i_h.to(tl.int32), start.to(tl.int32) * 2]), 1)
            lse, delta = tl.split(pairs.reshape(BLOCK_M, 2))
        else:
            b_q = load_tile(q, start, offsets, D, BLOCK_D, BLOCK_M, True, TMA)
            b_do = load_tile(do, start, offsets, E, BLOCK_E, BLOCK_M, True, TMA)
            if TMA:
                pairs = row_values.load([q.i_b.to(tl.int32), q.i_h.to(tl.int32), start.to(tl.int32) * 2])
                lse, delta = tl.split(pairs.reshape(BLOCK_M, 2))
            else:
                lse, delta = load_row_values(row_values, start + offsets, q.seqlen)
            scores = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            if NARROW:
                dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        scores, slope = cap_scores(scores, cap, CAPPED)
        if BIAS == "none":
            weights = weights_of(scores, lse[None, :], scale, b_q.dtype == tl.float32)
        else:
            pos_q, pos_k = start + offsets, tl.arange(0, BLOCK_N)
            pair_lse = lse_without_bias(
                lse[None, :], bias, pos_q[None, :], pos_k[:, None], b_q.dtype == tl.float32, BIAS
            )
            weights = weights_of(scores, pair_lse, scale, b_q.dtype == tl.float32)
        if MASKED:
            o_k = tl.arange(0, BLOCK_N)[:, None]
            if TMA:
                lo, hi, is_bits = in_block(lo, hi, mask_id, False, masks, Q_BLOCK, KV_BLOCK)
                o_q = offsets[None, :]
                if is_bits:
                    visible = shown_by_bits(masks, mask_id, part_q, part_k, o_q, o_k, Q_BLOCK, KV_BLOCK, BLOCK_N)
                    weights = tl.where(visible, weights, 0.0)
                apart = part_q - part_k + o_q
                weights = tl.where((apart >= o_k + lo) & (apart <= o_k + hi), weights, 0.0)
            else:
                if BLOCK_M > Q_BLOCK:
                    mask_id = mask_id[None, :]
                r, c = inner_q[None, :], part_k + o_k
                visible = visible_elements(masks, mask_id, r, c, Q_BLOCK, KV_BLOCK)
                weights = tl.where(visible, weights, 0.0)
        if not EARLY and GRADIENTS != "dk":
            dv = tl.dot(weights.to(b_do.dtype), b_do, dv, input_precision="ieee")
        if GRADIENTS != "dv":
            if not EARLY:
                dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
            ds = weights * (dp - delta[None, :]) * slope
        if EARLY and GRADIENTS != "dk":
            dv = tl.dot(weights.to(b_do.dtype), b_do, dv, input_precision="ieee")
        if GRADIENTS != "dv":
            dk = tl.dot(ds.to(b_q.dtype), b_q, dk, input_precision="ieee")
    return dk, dv


@kernel_launcher
@triton.jit(do_not_specialize=[*RUNTIME_SIZES, *SPLIT_SIZES])
def _sparse_attention_bwd_dkv_kernel(
    do_rows,  # pointers; under TMA, descriptors of (B, heads, seqlen, head_dim)
    q_rows,
    k_rows,
    v_rows,
    row_values,  # (B, Hq, padded_q, 2) fp32: lse and delta, written by the dq kernel
    p_dk,  # (B, M, Hk, D) contiguous
    p_dv,  # (B, M, Hk, E) contiguous
    tables,  # `LayoutTables` of the transposed layout
    capacity,
    num_masks,
    layout_stride_b,
    layout_stride_h,
    p_parts,
    p_sums,  # (slots, KV_BLOCK * (D + E)) fp32: dk, then dv
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
    HAS_PARTS: tl.constexpr,
    STAGED: tl.constexpr,  # full tiles of q and do are loaded separately, each as far ahead as shared memory allows
    GRADIENTS: tl.constexpr,  # "dk", "dv" or "dk and dv"
    PER_HEAD: tl.constexpr,  # sum each head of a group separately: exact fp32 needs short sums, and has the registers
    BIAS: tl.constexpr,  # "none", "slopes" or "table"
):
    """Compute dk and dv of a tile of keys of one kv head."""
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    parts = Parts(p_parts, num_parts, limit, batch_copies, head_copies)
    SPLIT_N: tl.constexpr = KV_BLOCK // BLOCK_N
    kv_heads = q_heads // group_size
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    # Under a causal mask, the first keys have the longest columns.
    part_programs = num_parts * batch_copies * head_copies * SPLIT_N  # these come first
    i_program = tl.maximum(tl.program_id(0) - part_programs, 0)
    i_head, i_tile = started_tile(i_program, kv_blocks * SPLIT_N, batch * kv_heads, span)
    i_hk = (i_head % kv_heads).to(tl.int64)
    i_b = (i_head // kv_heads).to(tl.int64)
    i_col = i_tile // SPLIT_N
    if HAS_PARTS:
        slot, part_b, part_h, part_col, part_tile, part_first, part_last = part_of(
            tl.program_id(0), parts, kv_blocks, kv_heads, SPLIT_N
        )
        i_b, i_hk = tl.where(slot >= 0, part_b, i_b), tl.where(slot >= 0, part_h, i_hk)
        i_tile, i_col = tl.where(slot >= 0, part_tile, i_tile), tl.where(slot >= 0, part_col, i_col)
        length = 0
        for i_group in range(group_size):
            layout_head = i_b * layout_stride_b + (i_hk * group_size + i_group) * layout_stride_h
            length += row_entries(layout, layout_head, i_col, kv_blocks)[2]
        slot, part_first, _, length = entries_of(slot, 0, 0, length, part_first, part_last, limit)
        part_last = part_first + length
        before = 0  # entries of earlier heads
    part_k = i_tile % SPLIT_N * BLOCK_N
    first_k = (i_col * KV_BLOCK + part_k).to(tl.int64)
    o_k = tl.arange(0, BLOCK_N)
    pos_k = first_k + o_k
    k = head_rows(k_rows, k_strides, i_b, i_hk, seqlen_k, TMA)
    v = head_rows(v_rows, v_strides, i_b, i_hk, seqlen_k, TMA)
    masks = masks_of(layout)
    b_k = load_tile(k, first_k, o_k, D, BLOCK_D, BLOCK_N, True, TMA)
    b_v = load_tile(v, first_k, o_k, E, BLOCK_E, BLOCK_N, True, TMA)
    NARROW: tl.constexpr = TMA and BLOCK_D <= 64 and BLOCK_E <= 64  # then dp and dv's left operand fit into registers
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for i_group in range(group_size):
        i_h = i_hk * group_size + i_group
        layout_head = i_b * layout_stride_b + i_h * layout_stride_h
        start, partial, total = row_entries(layout, layout_head, i_col, kv_blocks)
        if HAS_PARTS:
            begin = tl.minimum(tl.maximum(part_first - before, 0), total)
            end = tl.minimum(tl.maximum(part_last - before, begin), total)
            before += total
            start, total = start + begin, end - begin
            partial = tl.minimum(tl.maximum(partial - begin, 0), total)
        values_head = row_values
        if not TMA:
            values_head = row_values + (i_b * q_heads + i_h) * padded_q * 2
        q = head_rows(q_rows, q_strides, i_b, i_h, seqlen_q, TMA)
        do = head_rows(do_rows, do_strides, i_b, i_h, seqlen_q, TMA)
        bias = 0
        if BIAS != "none":
            bias = head_bias(p_bias, bias_strides, i_b, i_h, -first_k, seqlen_q, seqlen_k, BIAS)
        if PER_HEAD:
            sum_dk, sum_dv = dk, dv
            dk, dv = tl.zeros_like(dk), tl.zeros_like(dv)
        for i_pass in tl.static_range(2):
            if i_pass == 0:
                first, count = start, partial
            else:
                first, count = start + partial, total - partial
            dk, dv = _accumulate_dkv(
                dk, dv, b_k, b_v, part_k, q, do, values_head, scale, cap, tables, first, count, masks, bias,
                i_pass == 0, D, E, Q_BLOCK, KV_BLOCK, BLOCK_M, CAPPED, TMA, NARROW, STAGED, GRADIENTS, BIAS,
            )  # fmt: skip
        if PER_HEAD:
            dk, dv = sum_dk + dk, sum_dv + dv
    if HAS_PARTS:
        SUMS: tl.constexpr = KV_BLOCK * (D + E)
        p_sums += tl.maximum(slot, 0).to(tl.int64) * SUMS
        if GRADIENTS != "dv":
            store_part(p_sums, tl.minimum(slot, 0), dk, part_k + o_k, KV_BLOCK, D, BLOCK_D)
        if GRADIENTS != "dk":
            store_part(p_sums + KV_BLOCK * D, tl.minimum(slot, 0), dv, part_k + o_k, KV_BLOCK, E, BLOCK_E)
        pos_k = tl.where(slot == WHOLE, pos_k, -1)
    first_row = i_b * seqlen_k * kv_heads + i_hk
    if GRADIENTS != "dv":
        store_rows(p_dk + first_row * D, dk * scale, pos_k, kv_heads * D, seqlen_k, D, BLOCK_D)
    if GRADIENTS != "dk":
        store_rows(p_dv + first_row * E, dv, pos_k, kv_heads * E, seqlen_k, E, BLOCK_E)
