# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens: a program is one query and some q heads that share its list.

list of keys -> rows of k and v by pointer, BLOCK_N at a time -> online softmax -> out, lse
"""

import triton
import triton.language as tl

from dynaxx.kernels.gpu.primitives import exp_rounded
from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.triton.tokens.primitives import capped, chosen_keys, products, row_parts, store_parts

RUNTIME_SIZES = ["queries", "units", "select_heads", "kv_heads", "slots", "group_size"]


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _token_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_out,  # (T, Hq, E)
    p_lse,  # (Hq, T) fp32 contiguous
    p_chosen,  # (T, Hs, n) int32 contiguous
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
    acc_a = tl.zeros([ROWS, E_A], tl.float32)
    acc_b = tl.zeros([ROWS, E_B if E_B else 16], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(0, slots * GRAIN, BLOCK_N):
        key, visible = chosen_keys(p_list, first, slots, position, GRAIN, BLOCK_N)
        row = first_key + key
        k_a, k_b = row_parts(p_k + row * stride_kn + i_kv * stride_kh, visible, D, D_A, D_B)
        v_a, v_b = row_parts(p_v + row * stride_vn + i_kv * stride_vh, visible, E, E_A, E_B)
        scores, _ = capped(products(q_a, q_b, k_a, k_b, D_B) * scale, softcap, CAPPED)
        scores = tl.where(visible[None, :], scores, float("-inf"))
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
    empty = row_sum == 0
    total = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), row_max + tl.log(total))
    tl.store(p_lse + head * queries + t, lse, mask=inside)
    p_row = p_out + t.to(tl.int64) * stride_on + head * stride_oh
    store_parts(p_row, inside, acc_a / total[:, None], acc_b / total[:, None], E, E_A, E_B)
