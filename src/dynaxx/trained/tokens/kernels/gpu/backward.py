# SPDX-License-Identifier: Apache-2.0
"""Backward over chosen tokens for head_dim up to 256: dq, and what each tile adds to dk and dv.

With p = exp(s - lse) and delta = do . out - dlse:  dq = sum ds k,  dk = sum ds q,  dv = sum p do,  where
ds = p (do . v - delta) slope scale.

    tile of queries: q, do -> keys of its list: k, v -> p, ds -> dq in registers; rows of ds q, p do to memory

`sums.py` adds the rows of each key in a fixed order without atomics, so results are bitwise reproducible.
"""

import triton
import triton.language as tl

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.gpu.primitives import (
    capped,
    exponential,
    gradient_slab,
    key_value_parts,
    keys_of,
    list_entries,
    products,
    row_parts,
    store_parts,
    tile_list,
    tile_rows,
    visible_pairs,
)

RUNTIME_SIZES = ["queries", "units", "select_heads", "kv_heads", "slots", "group_size", "first_tile", "first_unit"]


@kernel_launcher
@triton.jit(do_not_specialize=["queries"])
def _token_delta_kernel(
    p_do,
    p_out,  # (T, Hq, E)
    p_dlse,  # (Hq, T)
    p_lse,  # (Hq, T) fp32 contiguous
    p_delta,  # (Hq, T) fp32 contiguous
    queries,
    do_strides,  # `PackedStrides`
    out_strides,
    stride_dlse_h,
    stride_dlse_n,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write delta = do . out - dlse; dlse is ignored for queries that see nothing."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    mask = (t < queries)[:, None] & (o_e < E)[None, :]
    do = tl.load(p_do + t[:, None] * do_strides.n + head * do_strides.h + o_e[None, :], mask=mask, other=0.0)
    out = tl.load(p_out + t[:, None] * out_strides.n + head * out_strides.h + o_e[None, :], mask=mask, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    dlse = tl.load(p_dlse + head * stride_dlse_h + t * stride_dlse_n, mask=t < queries, other=0.0)
    lse = tl.load(p_lse + head * queries + t, mask=t < queries, other=float("-inf"))
    delta -= tl.where(lse == float("-inf"), 0.0, dlse.to(tl.float32))
    tl.store(p_delta + head * queries + t, delta, mask=t < queries)


@triton.jit
def queries_and_gradients(
    p_q, p_do, p_lse, p_delta, rows, queries, q_strides, do_strides, D: tl.constexpr, E: tl.constexpr,
    D_A: tl.constexpr, D_B: tl.constexpr, E_A: tl.constexpr, E_B: tl.constexpr,
):  # fmt: skip
    """Return `row_parts` of q and of do, lse, and delta of the rows of a tile; lse is 0 for rows that see nothing."""
    q_a, q_b = row_parts(p_q + rows.t * q_strides.n + rows.head * q_strides.h, rows.inside, D, D_A, D_B)
    do_a, do_b = row_parts(p_do + rows.t * do_strides.n + rows.head * do_strides.h, rows.inside, E, E_A, E_B)
    lse = tl.load(p_lse + rows.head * queries + rows.t, mask=rows.inside, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(p_delta + rows.head * queries + rows.t, mask=rows.inside, other=0.0)
    return q_a, q_b, do_a, do_b, lse, delta


@triton.jit
def weights_and_gradients(
    q_a, q_b, k_a, k_b, do_a, do_b, v_a, v_b, visible, lse, delta, scale, softcap,
    D_B: tl.constexpr, E_B: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return p and ds of a tile, [ROWS, BLOCK_N] fp32."""
    scores, slope = capped(products(q_a, q_b, k_a, k_b, D_B) * scale, softcap, CAPPED)
    weights = tl.where(visible, exponential(tl.where(visible, scores, lse[:, None]) - lse[:, None], EXACT), 0.0)
    ds = weights * (products(do_a, do_b, v_a, v_b, E_B) - delta[:, None]) * slope * scale
    return weights, ds


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_bwd_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_dq,  # (T, Hq, D)
    p_rows,  # (kv heads, tiles, units of a kv head, parts, slots * GRAIN, D + E) of this launch: dk, then dv
    p_lse,  # (Hq, T) fp32 contiguous
    p_delta,  # the same
    lists,  # `ListTables`
    first_tile,  # of this launch
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
    dq_strides,
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
    tiles, parts = tl.num_programs(0), tl.num_programs(2)
    slab = gradient_slab(tl.program_id(0), tiles, tl.program_id(1), units // kv_heads, parts, i_part)
    p_rows += slab * slots * GRAIN * (D + E)
    q_a, q_b, do_a, do_b, lse, delta = queries_and_gradients(
        p_q, p_do, p_lse, p_delta, rows, queries, q_strides, do_strides, D, E, D_A, D_B, E_A, E_B
    )
    acc_a = tl.zeros([ROWS, D_A], tl.float32)
    acc_b = tl.zeros([ROWS, D_B if D_B else 16], tl.float32)
    count = own.count
    block, marks = list_entries(own.p_blocks, own.p_marks, 0, count, GRAIN, PER_TILE, BLOCK_N)
    for first in range(0, count * GRAIN, BLOCK_N):
        key, there = keys_of(block, first, last, GRAIN, BLOCK_N)
        k_a, k_b, v_a, v_b = key_value_parts(
            p_k, p_v, own.first_key + key, there, k_strides, v_strides, D, E, D_A, D_B, E_A, E_B, False, PREFETCH
        )
        visible = visible_pairs(key, there, marks, rows.place, position, PER_TILE, GRAIN) & rows.inside[:, None]
        block, marks = list_entries(own.p_blocks, own.p_marks, first + BLOCK_N, count, GRAIN, PER_TILE, BLOCK_N)
        weights, ds = weights_and_gradients(
            q_a, q_b, k_a, k_b, do_a, do_b, v_a, v_b, visible, lse, delta, scale, softcap, D_B, E_B, CAPPED, EXACT
        )  # fmt: skip
        weights, ds = weights.to(do_a.dtype), ds.to(k_a.dtype)
        acc_a = tl.dot(ds, k_a, acc_a, input_precision="ieee")
        if D_B:
            acc_b = tl.dot(ds, k_b, acc_b, input_precision="ieee")
        at = first + tl.arange(0, BLOCK_N)
        turned = tl.trans(weights)
        dv_a = tl.dot(turned, do_a, input_precision="ieee")
        dv_b = dv_a
        if E_B:
            dv_b = tl.dot(turned, do_b, input_precision="ieee")
        p_row = p_rows + at.to(tl.int64) * (D + E)
        store_parts(p_row + D, at < count * GRAIN, dv_a, dv_b, E, E_A, E_B)
        turned = tl.trans(ds)
        dk_a = tl.dot(turned, q_a, input_precision="ieee")
        dk_b = dk_a
        if D_B:
            dk_b = tl.dot(turned, q_b, input_precision="ieee")
        store_parts(p_row, at < count * GRAIN, dk_a, dk_b, D, D_A, D_B)
    store_parts(p_dq + rows.t * dq_strides.n + rows.head * dq_strides.h, rows.inside, acc_a, acc_b, D, D_A, D_B)
