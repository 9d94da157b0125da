# SPDX-License-Identifier: Apache-2.0
"""Backward over chosen tokens for head_dim above 256, latent attention (MLA) above all, in three steps.

Sums of dq, dk and dv do not fit a multiprocessor together, so p and ds go through memory, a few queries at a time:

    scores        q, do, k, v of a tile and its list -> p, ds          (rows of the tile, keys of the list)
    dq            ds, k gathered                     -> dq             half of the columns per program
    rows          ds, p, q, do                       -> ds' q, p' do   a row per key of the list, as `backward.py`

p and ds hold 2 numbers per pair, less than the 1,088 products that computing them again would take.
"""

import triton
import triton.language as tl

from dynaxx.kernels.primitives.prefetch import prefetched
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.gpu.backward import queries_and_gradients, weights_and_gradients
from dynaxx.trained.tokens.kernels.gpu.primitives import (
    gradient_slab,
    key_value_parts,
    keys_of,
    list_entries,
    tile_list,
    tile_rows,
    visible_pairs,
)

RUNTIME_SIZES = [
    "queries", "units", "select_heads", "kv_heads", "slots", "group_size", "first_tile", "first_unit", "chunks"
]  # fmt: skip


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_scores_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_weights,  # (tiles, units of this launch, parts * ROWS, slots * GRAIN) in q's dtype
    p_ds,  # the same
    p_lse,
    p_delta,
    lists,  # `ListTables`
    first_tile,
    first_unit,
    queries,
    units,
    select_heads,
    kv_heads,
    slots,
    group_size,
    scale,
    softcap,
    q_strides,  # `PackedStrides`
    k_strides,
    v_strides,
    do_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    E_A: tl.constexpr,
    E_B: tl.constexpr,
    GRAIN: tl.constexpr,
    PER_TILE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    LATENT: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    i_tile, i_unit, i_part = tl.program_id(0) + first_tile, tl.program_id(1) + first_unit, tl.program_id(2)
    rows = tile_rows(lists.p_tiles, i_tile, i_unit, i_part, group_size, PART, ROWS, ROWS)
    i_kv = (i_unit * kv_heads // units).to(tl.int64)
    p_k += i_kv * k_strides.h
    p_v += i_kv * v_strides.h
    position = tl.load(lists.p_position + rows.t, mask=rows.inside, other=-1)
    last = tl.max(position, 0)
    own = tile_list(lists, i_tile, i_unit, units, select_heads, slots, PER_TILE)
    q_a, q_b, do_a, do_b, lse, delta = queries_and_gradients(
        p_q, p_do, p_lse, p_delta, rows, queries, q_strides, do_strides, D, E, D_A, D_B, E_A, E_B
    )
    width = slots * GRAIN
    i_cell = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + i_part
    to_row = (i_cell * ROWS + tl.arange(0, ROWS)) * width
    block, marks = list_entries(own.p_blocks, own.p_marks, 0, own.count, GRAIN, PER_TILE, BLOCK_N)
    for first in range(0, own.count * GRAIN, BLOCK_N):
        key, there = keys_of(block, first, last, GRAIN, BLOCK_N)
        k_a, k_b, v_a, v_b = key_value_parts(
            p_k, p_v, own.first_key + key, there, k_strides, v_strides, D, E, D_A, D_B, E_A, E_B, LATENT, PREFETCH
        )
        visible = visible_pairs(key, there, marks, rows.place, position, PER_TILE, GRAIN) & rows.inside[:, None]
        block, marks = list_entries(own.p_blocks, own.p_marks, first + BLOCK_N, own.count, GRAIN, PER_TILE, BLOCK_N)
        weights, ds = weights_and_gradients(
            q_a, q_b, k_a, k_b, do_a, do_b, v_a, v_b, visible, lse, delta, scale, softcap, D_B, E_B, CAPPED, EXACT
        )  # fmt: skip
        at = first + tl.arange(0, BLOCK_N)
        tl.store(p_weights + to_row[:, None] + at[None, :], weights.to(do_a.dtype), mask=(at < width)[None, :])
        tl.store(p_ds + to_row[:, None] + at[None, :], ds.to(k_a.dtype), mask=(at < width)[None, :])


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_dq_kernel(
    p_k,
    p_dq,  # (T, Hq, D)
    p_ds,
    lists,
    first_tile,
    first_unit,
    units,
    select_heads,
    kv_heads,
    slots,
    group_size,
    k_strides,
    dq_strides,
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    HALF_A: tl.constexpr,  # columns of the first part, and of the rest, that a program computes
    HALF_B: tl.constexpr,
    GRAIN: tl.constexpr,
    PER_TILE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,  # of a part of a tile; as many queries in each part
    BOTH: tl.constexpr,  # rows that a program computes: one or more parts
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    PARTS: tl.constexpr = BOTH // ROWS
    i_tile, i_unit = tl.program_id(0) + first_tile, tl.program_id(1) + first_unit
    i_half, i_part = tl.program_id(2) % HALVES, tl.program_id(2) // HALVES
    parts = tl.num_programs(2) // HALVES * PARTS
    rows = tile_rows(lists.p_tiles, i_tile, i_unit, i_part, group_size, PART, ROWS, BOTH)
    own = tile_list(lists, i_tile, i_unit, units, select_heads, slots, PER_TILE)
    last = tl.load(lists.p_position + tl.load(lists.p_tiles + 2 * i_tile) + tl.load(lists.p_tiles + 2 * i_tile + 1) - 1)
    p_k += (i_unit * kv_heads // units).to(tl.int64) * k_strides.h
    count = own.count
    width = slots * GRAIN
    i_cell = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * parts + i_part * PARTS
    from_row = (i_cell * ROWS + tl.arange(0, BOTH)) * width
    o_a, o_b = i_half * HALF_A + tl.arange(0, HALF_A), D_A + i_half * HALF_B + tl.arange(0, HALF_B)
    acc_a = tl.zeros([BOTH, HALF_A], tl.float32)
    acc_b = tl.zeros([BOTH, HALF_B], tl.float32)
    block, _ = list_entries(own.p_blocks, own.p_blocks, 0, count, GRAIN, 1, BLOCK_N)
    for first in range(0, count * GRAIN, BLOCK_N):
        key, there = keys_of(block, first, last, GRAIN, BLOCK_N)
        block, _ = list_entries(own.p_blocks, own.p_blocks, first + BLOCK_N, count, GRAIN, 1, BLOCK_N)
        p_rows = p_k + (own.first_key + key) * k_strides.n
        at = first + tl.arange(0, BLOCK_N)
        ds = tl.load(p_ds + from_row[:, None] + at[None, :], mask=(at < count * GRAIN)[None, :], other=0.0)
        k_a = tl.load(p_rows[:, None] + o_a[None, :], mask=there[:, None] & (o_a < D)[None, :], other=0.0)
        if PREFETCH:
            ds, k_a = prefetched(ds, PREFETCH), prefetched(k_a, PREFETCH)
        acc_a = tl.dot(ds, k_a, acc_a, input_precision="ieee")
        if D_B:
            k_b = tl.load(p_rows[:, None] + o_b[None, :], mask=there[:, None] & (o_b < D)[None, :], other=0.0)
            if PREFETCH:
                k_b = prefetched(k_b, PREFETCH)
            acc_b = tl.dot(ds, k_b, acc_b, input_precision="ieee")
    p_row, inside = (p_dq + rows.t * dq_strides.n + rows.head * dq_strides.h)[:, None], rows.inside
    tl.store(p_row + o_a[None, :], acc_a.to(p_dq.dtype.element_ty), mask=inside[:, None] & (o_a < D)[None, :])
    if D_B:
        tl.store(p_row + o_b[None, :], acc_b.to(p_dq.dtype.element_ty), mask=inside[:, None] & (o_b < D)[None, :])


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_rows_kernel(
    p_q,
    p_do,
    p_weights,
    p_ds,
    p_rows,  # (kv heads, tiles, units of a kv head, parts, slots * GRAIN, D + E) of this launch; D if LATENT
    lists,
    first_tile,
    first_unit,
    units,
    select_heads,
    kv_heads,
    slots,
    group_size,
    chunks,  # of keys
    q_strides,
    do_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    GRAIN: tl.constexpr,
    PER_TILE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LATENT: tl.constexpr,  # add p' do to the first columns of ds' q
):
    i_tile, i_unit = tl.program_id(0) // chunks + first_tile, tl.program_id(1) + first_unit
    i_part = tl.program_id(2)
    first = tl.program_id(0) % chunks * BLOCK_N
    count = slots
    if PER_TILE > 1:
        count = tl.load(lists.p_counts + i_tile.to(tl.int64) * select_heads + i_unit * select_heads // units)
    if first < count * GRAIN:
        o_row, at = tl.arange(0, BOTH), first + tl.arange(0, BLOCK_N)
        rows = tile_rows(lists.p_tiles, i_tile, i_unit, i_part, group_size, PART, ROWS, BOTH)
        inside = rows.inside
        width, parts = slots * GRAIN, tl.num_programs(2)
        i_cell = ((i_tile - first_tile).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * parts + i_part
        from_row = (i_cell * BOTH + o_row) * width
        known = (at < count * GRAIN)[None, :]
        ds = tl.trans(tl.load(p_ds + from_row[:, None] + at[None, :], mask=known, other=0.0))
        weights = tl.trans(tl.load(p_weights + from_row[:, None] + at[None, :], mask=known, other=0.0))
        tiles = tl.num_programs(0) // chunks
        slab = gradient_slab(i_tile - first_tile, tiles, tl.program_id(1), units // kv_heads, parts, i_part)
        p_row = (p_rows + (slab * width + at) * (D if LATENT else D + E))[:, None]
        p_q_row = (p_q + rows.t * q_strides.n + rows.head * q_strides.h)[:, None]
        p_do_row = (p_do + rows.t * do_strides.n + rows.head * do_strides.h)[:, None]
        there = (at < count * GRAIN)[:, None]
        element = p_rows.dtype.element_ty
        for column in range(0, D, BLOCK_D):
            o_d = column + tl.arange(0, BLOCK_D)
            q = tl.load(p_q_row + o_d[None, :], mask=inside[:, None] & (o_d < D)[None, :], other=0.0)
            acc = tl.dot(ds, q, input_precision="ieee")
            if LATENT:
                do = tl.load(p_do_row + o_d[None, :], mask=inside[:, None] & (o_d < E)[None, :], other=0.0)
                acc = tl.dot(weights, do, acc, input_precision="ieee")
            tl.store(p_row + o_d[None, :], acc.to(element), mask=there & (o_d < D)[None, :])
        if not LATENT:
            for column in range(0, E, BLOCK_D):
                o_e = column + tl.arange(0, BLOCK_D)
                do = tl.load(p_do_row + o_e[None, :], mask=inside[:, None] & (o_e < E)[None, :], other=0.0)
                acc = tl.dot(weights, do, input_precision="ieee")
                tl.store(p_row + D + o_e[None, :], acc.to(element), mask=there & (o_e < E)[None, :])
