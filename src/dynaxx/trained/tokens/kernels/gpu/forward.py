# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens: a program is a tile of queries and q heads that share a list.

list of keys -> rows of k and v by pointer, BLOCK_N at a time -> online softmax -> out, lse
"""

import triton
import triton.language as tl

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.gpu.primitives import (
    capped,
    exponential,
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

RUNTIME_SIZES = ["queries", "units", "select_heads", "kv_heads", "slots", "group_size"]


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_out,  # (T, Hq, E)
    p_lse,  # (Hq, T) fp32 contiguous
    lists,  # `ListTables`
    queries,
    units,  # groups of q heads that share a kv head and a list
    select_heads,
    kv_heads,
    slots,
    group_size,
    scale,
    softcap,
    q_strides,  # `PackedStrides`
    k_strides,
    v_strides,
    out_strides,
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
    LATENT: tl.constexpr,  # values are the first part of the keys
    PREFETCH: tl.constexpr,  # how far ahead rows of k and v are loaded
):
    i_tile, i_unit = tl.program_id(0), tl.program_id(1)
    rows = tile_rows(lists.p_tiles, i_tile, i_unit, tl.program_id(2), group_size, PART, ROWS, ROWS)
    i_kv = (i_unit * kv_heads // units).to(tl.int64)
    p_k += i_kv * k_strides.h
    p_v += i_kv * v_strides.h
    position = tl.load(lists.p_position + rows.t, mask=rows.inside, other=-1)
    last = tl.max(position, 0)
    own = tile_list(lists, i_tile, i_unit, units, select_heads, slots, PER_TILE)
    q_a, q_b = row_parts(p_q + rows.t * q_strides.n + rows.head * q_strides.h, rows.inside, D, D_A, D_B)
    acc_a = tl.zeros([ROWS, E_A], tl.float32)
    acc_b = tl.zeros([ROWS, E_B if E_B else 16], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    block, marks = list_entries(own.p_blocks, own.p_marks, 0, own.count, GRAIN, PER_TILE, BLOCK_N)
    for first in range(0, own.count * GRAIN, BLOCK_N):
        key, there = keys_of(block, first, last, GRAIN, BLOCK_N)
        k_a, k_b, v_a, v_b = key_value_parts(
            p_k, p_v, own.first_key + key, there, k_strides, v_strides, D, E, D_A, D_B, E_A, E_B, LATENT, PREFETCH
        )
        scores, _ = capped(products(q_a, q_b, k_a, k_b, D_B) * scale, softcap, CAPPED)
        visible = visible_pairs(key, there, marks, rows.place, position, PER_TILE, GRAIN)
        block, marks = list_entries(own.p_blocks, own.p_marks, first + BLOCK_N, own.count, GRAIN, PER_TILE, BLOCK_N)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = exponential(row_max - shift, EXACT)
        weights = exponential(scores - shift[:, None], EXACT)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(v_a.dtype)
        acc_a = tl.dot(weights, v_a, acc_a * rescale[:, None], input_precision="ieee")
        if E_B:
            acc_b = tl.dot(weights, v_b, acc_b * rescale[:, None], input_precision="ieee")
    empty = row_sum == 0
    total = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), row_max + tl.log(total))
    tl.store(p_lse + rows.head * queries + rows.t, lse, mask=rows.inside)
    p_row = p_out + rows.t * out_strides.n + rows.head * out_strides.h
    store_parts(p_row, rows.inside, acc_a / total[:, None], acc_b / total[:, None], E, E_A, E_B)
