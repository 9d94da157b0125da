# SPDX-License-Identifier: Apache-2.0
"""A decoding step over chosen tokens of a cache: pieces of each query's list, and their merge.

    piece of a list -> page and place of each key -> k, v -> sum of weighted values, largest score, sum of weights
    pieces of a list (and its sink) -> out, lse

8-bit keys and values are multiplied by their scales when they are loaded. Exact tokens have tensors of their own.

Legend: B batch, N queries of a step, Hq / Hk / Hs query, kv and selection heads, n slots, D / E head_dim of k and v.
"""

import triton
import triton.language as tl

from dynaxx.kernels.decode.triton.pages import PageTable, first_key, physical_pages
from dynaxx.kernels.primitives.numbers import exp_rounded
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.gpu.primitives import capped, listed_keys, products, row_parts, store_parts


@triton.jit
def _cached_rows(
    p_cache, p_scale, p_exact, to_row, to_scale, to_exact, there, is_exact,
    W: tl.constexpr, W_A: tl.constexpr, W_B: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return rows of a cache in two parts, in `dtype`: values of 8 bits times their scale, exact tokens as they are."""
    b_a, b_b = row_parts(p_cache + to_row, there & (is_exact == 0), W, W_A, W_B)
    if SCALED:
        scale = tl.load(p_scale + to_scale, mask=there, other=0.0)[:, None]
        b_a, b_b = b_a.to(tl.float32) * scale, b_b.to(tl.float32) * scale
    if EXACT:
        own_a, own_b = row_parts(p_exact + to_exact, there & is_exact, W, W_A, W_B)
        b_a = tl.where(is_exact[:, None], own_a.to(tl.float32), b_a)
        b_b = tl.where(is_exact[:, None], own_b.to(tl.float32), b_b)
    return b_a.to(dtype), b_b.to(dtype)


@kernel_launcher
@triton.jit(
    do_not_specialize=["seqlen_q", "units", "select_heads", "kv_heads", "slots", "group_size", "pieces", "num_physical"]
)
def _token_decode_kernel(
    p_q,
    p_k,
    p_v,
    p_acc,  # (B * N, Hq, pieces, E) fp32
    p_state,  # (B * N, Hq, pieces, 2) fp32: largest score, sum of weights
    p_chosen,  # (B * N, Hs, n) int32 contiguous
    p_k_scale,
    p_v_scale,
    p_exact_k,  # (B, EXACT, Hk, D) contiguous
    p_exact_v,
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    seqlen_q,
    units,
    select_heads,
    kv_heads,
    slots,
    group_size,
    pieces,
    scale,
    softcap,
    q_strides,  # `Strides`
    k_strides,  # `PageStrides`
    v_strides,
    k_scale_strides,  # `RowStrides`
    v_scale_strides,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    EXACT: tl.constexpr,  # slots of exact tokens; 0: none
    SINKS: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    E_A: tl.constexpr,
    E_B: tl.constexpr,
    GRAIN: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
):
    table = PageTable(p_table, table_stride, num_physical)
    i_query, i_unit = tl.program_id(0), tl.program_id(1)
    i_piece, i_part = tl.program_id(2) % pieces, tl.program_id(2) // pieces
    i_b, i_n = (i_query // seqlen_q).to(tl.int64), i_query % seqlen_q
    member = i_part * PART + tl.arange(0, PART)
    inside = member < group_size
    head = (i_unit * group_size + member).to(tl.int64)
    i_kv = (i_unit * kv_heads // units).to(tl.int64)
    seqused = tl.load(p_seqused + i_b)
    leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    last = seqused - seqlen_q + i_n
    q_a, q_b = row_parts(p_q + i_b * q_strides.b + i_n * q_strides.n + head * q_strides.h, inside, D, D_A, D_B)
    acc_a = tl.zeros([PART, E_A], tl.float32)
    acc_b = tl.zeros([PART, E_B if E_B else 16], tl.float32)
    row_max = tl.full([PART], float("-inf"), tl.float32)
    row_sum = tl.zeros([PART], tl.float32)
    p_list = p_chosen + (i_query.to(tl.int64) * select_heads + i_unit * select_heads // units) * slots
    steps = tl.cdiv(slots * GRAIN, BLOCK_N)
    for i_step in range(i_piece * steps // pieces, (i_piece + 1) * steps // pieces):
        key, there = listed_keys(p_list, i_step * BLOCK_N, slots, last, GRAIN, BLOCK_N)
        there &= key >= leftpad
        physical = physical_pages(table, i_b, key // PAGE, there, PAGED).to(tl.int64)
        if PAGED:
            there &= physical >= 0
        is_exact = there & False
        to_exact = physical * 0
        if EXACT:
            first = key < leftpad + SINKS
            is_exact = there & (first | (key >= seqused - (EXACT - SINKS)))
            slot = tl.where(first, key - leftpad, SINKS + key % (EXACT - SINKS))
            to_exact = (i_b * EXACT + slot) * kv_heads + i_kv
            there |= is_exact
        place = (key % PAGE).to(tl.int64)
        k_a, k_b = _cached_rows(
            p_k,
            p_k_scale,
            p_exact_k,
            i_b * k_strides.batch + physical * k_strides.page + place * k_strides.token + i_kv * k_strides.head,
            i_b * k_scale_strides.batch + physical * k_scale_strides.page + i_kv * k_scale_strides.head,
            to_exact * D,
            there,
            is_exact,
            D,
            D_A,
            D_B,
            SCALED,
            EXACT,
            q_a.dtype,
        )
        if LATENT:
            v_a, v_b = k_a, k_b
        else:
            v_a, v_b = _cached_rows(
                p_v,
                p_v_scale,
                p_exact_v,
                i_b * v_strides.batch + physical * v_strides.page + place * v_strides.token + i_kv * v_strides.head,
                i_b * v_scale_strides.batch + physical * v_scale_strides.page + i_kv * v_scale_strides.head,
                to_exact * E,
                there,
                is_exact,
                E,
                E_A,
                E_B,
                SCALED,
                EXACT,
                q_a.dtype,
            )
        scores, _ = capped(products(q_a, q_b, k_a, k_b, D_B) * scale, softcap, CAPPED)
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = exp_rounded(row_max - shift)
        weights = exp_rounded(scores - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(v_a.dtype)
        acc_a = tl.dot(weights, v_a, acc_a * rescale[:, None], input_precision="ieee")
        if E_B:
            acc_b = tl.dot(weights, v_b, acc_b * rescale[:, None], input_precision="ieee")
    part = (i_query.to(tl.int64) * units * group_size + head) * pieces + i_piece
    store_parts(p_acc + part * E, inside, acc_a, acc_b, E, E_A, E_B)
    tl.store(p_state + part * 2, row_max, mask=inside)
    tl.store(p_state + part * 2 + 1, row_sum, mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen_q", "q_heads", "pieces"])
def _token_merge_kernel(
    p_acc,
    p_state,
    p_out,  # (B, N, Hq, E) contiguous
    p_lse,  # (B, Hq, N) contiguous, fp32
    p_sinks,  # (Hq,)
    seqlen_q,
    q_heads,
    pieces,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the pieces of a query and head; zeros if it sees nothing."""
    i_query, i_head = tl.program_id(0), tl.program_id(1)
    o_p, o_e = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    row = i_query.to(tl.int64) * q_heads + i_head
    part = row * pieces + o_p
    largest = tl.load(p_state + part * 2, mask=o_p < pieces, other=float("-inf"))
    sums = tl.load(p_state + part * 2 + 1, mask=o_p < pieces, other=0.0)
    top = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(p_sinks + i_head).to(tl.float32)
        top = tl.maximum(top, sink)
    empty = top == float("-inf")
    shift = tl.where(empty, 0.0, top)
    weights = exp_rounded(largest - shift)
    total = tl.sum(sums * weights, 0)
    if HAS_SINKS:
        total += tl.sum(exp_rounded(sink - shift + tl.zeros([1], tl.float32)), 0)
    mask = (o_p < pieces)[:, None] & (o_e < E)[None, :]
    acc = tl.sum(tl.load(p_acc + part[:, None] * E + o_e[None, :], mask=mask, other=0.0) * weights[:, None], 0)
    total = tl.where(empty, 1.0, total)
    tl.store(p_out + row * E + o_e, (acc / total).to(p_out.dtype.element_ty), mask=o_e < E)
    lse = tl.where(empty, float("-inf"), top + tl.log(total))
    i_b, i_n = i_query // seqlen_q, i_query % seqlen_q
    tl.store(p_lse + (i_b.to(tl.int64) * q_heads + i_head) * seqlen_q + i_n, lse)
