# SPDX-License-Identifier: Apache-2.0
"""Backward over chosen tokens, deterministic: dq by query, as forward goes; dk and dv by key, over who chose it.

With p = exp(s - lse) and delta = do . out - dlse:  dq = sum ds k,  dk = sum ds q,  dv = sum p do,  where
ds = p (do . v - delta) scale. A program for dk and dv holds one key and gathers rows of q and do. Its products are no
matrix products, so it is far from what the matrix units could do: it is here to be right and to need no atomics.
"""

import triton
import triton.language as tl

from dynaxx.kernels.gpu.primitives import exp_rounded
from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.triton.tokens.primitives import capped, chosen_keys, products, row_parts, store_parts

RUNTIME_SIZES = ["queries", "keys", "units", "select_heads", "kv_heads", "slots", "group_size"]


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_bwd_dq_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_dq,  # (T, Hq, D)
    p_lse,  # (Hq, T) fp32 contiguous
    p_delta,  # the same
    p_chosen,
    p_position,
    p_first_key,
    queries,
    units,
    select_heads,
    kv_heads,
    slots,
    group_size,
    scale,
    softcap,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_don,
    stride_doh,
    stride_dqn,
    stride_dqh,
    D: tl.constexpr,
    E: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    E_A: tl.constexpr,
    E_B: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
):
    t = tl.program_id(0)
    i_unit = tl.program_id(1)
    member = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = member < group_size
    head = (i_unit * group_size + member).to(tl.int64)
    i_select, i_kv = i_unit * select_heads // units, (i_unit * kv_heads // units).to(tl.int64)
    p_list = p_chosen + (t.to(tl.int64) * select_heads + i_select) * slots
    position, first_key = tl.load(p_position + t), tl.load(p_first_key + t).to(tl.int64)
    q_a, q_b = row_parts(p_q + t.to(tl.int64) * stride_qn + head * stride_qh, inside, D, D_A, D_B)
    do_a, do_b = row_parts(p_do + t.to(tl.int64) * stride_don + head * stride_doh, inside, E, E_A, E_B)
    lse = tl.load(p_lse + head * queries + t, mask=inside, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(p_delta + head * queries + t, mask=inside, other=0.0)
    acc_a = tl.zeros([ROWS, D_A], tl.float32)
    acc_b = tl.zeros([ROWS, D_B if D_B else 16], tl.float32)
    for first in range(0, slots * GRAIN, BLOCK_N):
        key, visible = chosen_keys(p_list, first, slots, position, GRAIN, BLOCK_N)
        row = first_key + key
        k_a, k_b = row_parts(p_k + row * stride_kn + i_kv * stride_kh, visible, D, D_A, D_B)
        v_a, v_b = row_parts(p_v + row * stride_vn + i_kv * stride_vh, visible, E, E_A, E_B)
        scores, slope = capped(products(q_a, q_b, k_a, k_b, D_B) * scale, softcap, CAPPED)
        weights = tl.where(visible[None, :], exp_rounded(scores - lse[:, None]), 0.0)
        ds = weights * (products(do_a, do_b, v_a, v_b, E_B) - delta[:, None]) * slope * scale
        ds = ds.to(k_a.dtype)
        acc_a = tl.dot(ds, k_a, acc_a, input_precision="ieee")
        if D_B:
            acc_b = tl.dot(ds, k_b, acc_b, input_precision="ieee")
    store_parts(p_dq + t.to(tl.int64) * stride_dqn + head * stride_dqh, inside, acc_a, acc_b, D, D_A, D_B)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_bwd_dkv_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_dk,  # (M, Hk, D) contiguous
    p_dv,  # (M, Hk, E) contiguous
    p_lse,
    p_delta,
    p_entries,  # (entries,) int32, t * units / kv_heads + unit of the kv head, by (kv head, key)
    p_begin,  # (Hk * M + 1,) int32, where those of each (kv head, key) begin
    queries,
    keys,
    units,
    kv_heads,
    group_size,
    scale,
    softcap,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_don,
    stride_doh,
    D: tl.constexpr,
    E: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    E_A: tl.constexpr,
    E_B: tl.constexpr,
    GROUP: tl.constexpr,  # group_size as a power of two
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    i_key = tl.program_id(0)
    i_kv = tl.program_id(1).to(tl.int64)
    own_units = units // kv_heads
    one = tl.full([1], 1, tl.int1)
    at = i_key.to(tl.int64) + tl.zeros([1], tl.int64)
    k_a, k_b = row_parts(p_k + at * stride_kn + i_kv * stride_kh, one, D, D_A, D_B)
    v_a, v_b = row_parts(p_v + at * stride_vn + i_kv * stride_vh, one, E, E_A, E_B)
    k_a, k_b, v_a, v_b = k_a.to(tl.float32), k_b.to(tl.float32), v_a.to(tl.float32), v_b.to(tl.float32)
    dk_a = tl.zeros([1, D_A], tl.float32)
    dk_b = tl.zeros([1, D_B if D_B else 16], tl.float32)
    dv_a = tl.zeros([1, E_A], tl.float32)
    dv_b = tl.zeros([1, E_B if E_B else 16], tl.float32)
    begin, end = tl.load(p_begin + i_kv * keys + i_key), tl.load(p_begin + i_kv * keys + i_key + 1)
    for first in range(begin * GROUP, end * GROUP, ROWS):
        o_row = first + tl.arange(0, ROWS)
        inside = (o_row < end * GROUP) & (o_row % GROUP < group_size)
        entry = tl.load(p_entries + o_row // GROUP, mask=inside, other=0)
        t = (entry // own_units).to(tl.int64)
        head = (i_kv * own_units + entry % own_units) * group_size + o_row % GROUP
        q_a, q_b = row_parts(p_q + t * stride_qn + head * stride_qh, inside, D, D_A, D_B)
        do_a, do_b = row_parts(p_do + t * stride_don + head * stride_doh, inside, E, E_A, E_B)
        q_a, q_b, do_a, do_b = q_a.to(tl.float32), q_b.to(tl.float32), do_a.to(tl.float32), do_b.to(tl.float32)
        product, grad = tl.sum(q_a * k_a, 1), tl.sum(do_a * v_a, 1)
        if D_B:
            product += tl.sum(q_b * k_b, 1)
        if E_B:
            grad += tl.sum(do_b * v_b, 1)
        scores, slope = capped(product * scale, softcap, CAPPED)
        lse = tl.load(p_lse + head * queries + t, mask=inside, other=0.0)
        delta = tl.load(p_delta + head * queries + t, mask=inside, other=0.0)
        weights = tl.where(inside & (lse > float("-inf")), exp_rounded(scores - lse), 0.0)
        ds = weights * (grad - delta) * slope * scale
        dk_a += tl.sum(ds[:, None] * q_a, 0)[None, :]
        dv_a += tl.sum(weights[:, None] * do_a, 0)[None, :]
        if D_B:
            dk_b += tl.sum(ds[:, None] * q_b, 0)[None, :]
        if E_B:
            dv_b += tl.sum(weights[:, None] * do_b, 0)[None, :]
    place = at * kv_heads + i_kv
    store_parts(p_dk + place * D, one, dk_a, dk_b, D, D_A, D_B)
    store_parts(p_dv + place * E, one, dv_a, dv_b, E, E_A, E_B)
