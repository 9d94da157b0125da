# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens: a program is a tile of queries and q heads that share a list.

list of keys -> rows of k and v by pointer, BLOCK_N at a time -> online softmax -> out, lse
"""

import triton
import triton.language as tl

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.gpu.tokens.primitives import (
    capped,
    exponential,
    keys_of,
    list_entries,
    products,
    row_parts,
    store_parts,
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
    p_lists,  # (tiles, Hs, slots) int32 contiguous: blocks
    p_marks,  # the same: a bit per query of the tile
    p_counts,  # (tiles, Hs) int32: entries of each list
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32, of each query among the keys of its sequence
    p_first_key,  # (T,) int32, row of the first key of its sequence
    queries,
    units,  # groups of q heads that share a kv head and a list
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
    stride_on,
    stride_oh,
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
    TURNS: tl.constexpr,  # how far ahead rows of k and v are loaded
):
    i_tile, i_unit = tl.program_id(0), tl.program_id(1)
    t, head, place, inside = tile_rows(p_tiles, i_tile, i_unit, tl.program_id(2) * PART, group_size, PART, ROWS)
    i_list = i_tile.to(tl.int64) * select_heads + i_unit * select_heads // units
    i_kv = (i_unit * kv_heads // units).to(tl.int64)
    p_k += i_kv * stride_kh
    p_v += i_kv * stride_vh
    position = tl.load(p_position + t, mask=inside, other=-1)
    last = tl.max(position, 0)
    first_key = tl.load(p_first_key + tl.load(p_tiles + 2 * i_tile)).to(tl.int64)
    count = slots
    if PER_TILE > 1:
        count = tl.load(p_counts + i_list)
    q_a, q_b = row_parts(p_q + t * stride_qn + head * stride_qh, inside, D, D_A, D_B)
    acc_a = tl.zeros([ROWS, E_A], tl.float32)
    acc_b = tl.zeros([ROWS, E_B if E_B else 16], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    p_lists += i_list * slots
    p_marks += i_list * slots
    block, marks = list_entries(p_lists, p_marks, 0, count, GRAIN, PER_TILE, BLOCK_N)
    for first in range(0, count * GRAIN, BLOCK_N):
        key, there = keys_of(block, first, last, GRAIN, BLOCK_N)
        row = first_key + key
        k_a, k_b = row_parts(p_k + row * stride_kn, there, D, D_A, D_B, TURNS)
        if LATENT:
            v_a, v_b = k_a, k_b
        else:
            v_a, v_b = row_parts(p_v + row * stride_vn, there, E, E_A, E_B, TURNS)
        scores, _ = capped(products(q_a, q_b, k_a, k_b, D_B) * scale, softcap, CAPPED)
        visible = visible_pairs(key, there, marks, place, position, PER_TILE, GRAIN)
        block, marks = list_entries(p_lists, p_marks, first + BLOCK_N, count, GRAIN, PER_TILE, BLOCK_N)
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
    tl.store(p_lse + head * queries + t, lse, mask=inside)
    p_row = p_out + t * stride_on + head * stride_oh
    store_parts(p_row, inside, acc_a / total[:, None], acc_b / total[:, None], E, E_A, E_B)
