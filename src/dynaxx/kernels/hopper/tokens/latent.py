# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens of latent attention (MLA): values are the first 512 of the keys' 576 numbers.

A program is one query and 64 of its q heads, two warpgroups that share all work. Rows of keys are gathered by cp.async
into one of two buffers of 64, while the products of the buffer before go on:

    wait for out += p v of tile i - 1, and for the keys of tile i
    s = q k of tile i begins -> gather of tile i + 1 begins, over tile i - 1 -> softmax of s -> out += p v begins

So a gather has a whole turn of the loop to arrive. Triton's own pipeline would need a third buffer for that, and the
multiprocessor has room for two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.hopper.tokens.gather import (
    REST,
    ROWS,
    TILE,
    WIDE,
    copy_heads,
    copy_keys,
    listed_rows,
    listed_tokens,
)

BLOCK_N = gl.constexpr(64)  # keys of a tile
WARPS = 8
LN2 = gl.constexpr(0.6931471805599453)
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))  # a warp copies half a row at once
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))


@kernel_launcher
@gluon.jit(do_not_specialize=["queries", "slots", "group_size", "parts"])
def _token_latent_kernel(
    p_q,
    p_k,
    p_out,  # (T, Hq, 512)
    p_lse,  # (Hq, T) fp32 contiguous
    p_chosen,  # (T, 1, n) int32 contiguous
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    queries,
    slots,
    group_size,  # q heads
    parts,  # programs of a query
    scale_log2,
    q_strides,  # `PackedStrides`
    k_strides,
    out_strides,
):
    i_program = gl.program_id(0)
    t, i_part = (i_program // parts).to(gl.int64), i_program % parts
    p_list = p_chosen + t * slots
    last = gl.load(p_position + t)
    p_k += gl.load(p_first_key + t).to(gl.int64) * k_strides.n
    dtype: gl.constexpr = p_q.dtype.element_ty

    q_wide = gl.allocate_shared_memory(dtype, [ROWS, WIDE], TILE)
    q_rest = gl.allocate_shared_memory(dtype, [ROWS, REST], TILE)
    k_wide = gl.allocate_shared_memory(dtype, [2, BLOCK_N, WIDE], TILE)
    k_rest = gl.allocate_shared_memory(dtype, [2, BLOCK_N, REST], TILE)
    score_keys: gl.constexpr = gl.SliceLayout(0, SCORES)

    tiles = gl.cdiv(slots, BLOCK_N)
    first_tokens = listed_rows(p_list, 0, slots, BLOCK_N, WIDE_ROWS, REST_ROWS)
    copy_keys(k_wide.index(0), k_rest.index(0), p_k, first_tokens, last, k_strides, WIDE_ROWS, REST_ROWS)
    async_copy.commit_group()
    next_tokens = listed_rows(p_list, 1, slots, BLOCK_N, WIDE_ROWS, REST_ROWS)
    key = listed_tokens(p_list, 0, slots, BLOCK_N, score_keys)

    copy_heads(q_wide, p_q, t, i_part, group_size, q_strides, 0, WIDE_ROWS)
    copy_heads(q_rest, p_q, t, i_part, group_size, q_strides, WIDE, REST_ROWS)

    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = warpgroup_mma_init(gl.zeros([ROWS, WIDE], gl.float32, SUMS))
    for i_tile in range(tiles):
        sums = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        own_wide, own_rest = k_wide.index(i_tile % 2), k_rest.index(i_tile % 2)
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        token = warpgroup_mma(q_wide, own_wide.permute((1, 0)), zero, use_acc=False, is_async=True)
        token = warpgroup_mma(q_rest, own_rest.permute((1, 0)), token, is_async=True)
        if i_tile + 1 < tiles:
            other = (i_tile + 1) % 2
            copy_keys(k_wide.index(other), k_rest.index(other), p_k, next_tokens, last, k_strides, WIDE_ROWS, REST_ROWS)
        async_copy.commit_group()
        next_tokens = listed_rows(p_list, i_tile + 2, slots, BLOCK_N, WIDE_ROWS, REST_ROWS)
        there = (key >= 0) & (key <= last)
        key = listed_tokens(p_list, i_tile + 1, slots, BLOCK_N, score_keys)
        scores = warpgroup_mma_wait(0, deps=[token])
        scores = gl.where(there[None, :], scores * scale_log2, -float("inf"))
        new_max = gl.maximum(row_max, gl.max(scores, 1))
        shift = gl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - shift)
        weights = gl.exp2(scores - shift[:, None])
        row_sum = row_sum * rescale + gl.sum(weights, 1)
        row_max = new_max
        weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
        acc = warpgroup_mma(weights, own_wide, sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    empty = row_sum == 0
    total = gl.where(empty, 1.0, row_sum)
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    lse = gl.where(empty, -float("inf"), row_max * LN2 + gl.log(total))
    gl.store(p_lse + head.to(gl.int64) * queries + t, lse, mask=head < group_size)
    sums = sums / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    p_rows = p_out + t * out_strides.n + head.to(gl.int64)[:, None] * out_strides.h
    o_wide = gl.arange(0, WIDE, gl.SliceLayout(0, SUMS))
    gl.store(p_rows + o_wide[None, :], sums.to(p_out.dtype.element_ty), mask=(head < group_size)[:, None])
