# SPDX-License-Identifier: Apache-2.0
"""First step of the backward over chosen tokens of latent attention: weights p and their gradients ds, to memory.

A program is one query and 64 of its q heads. q and do stay in shared memory. Tiles of keys, whose first part are the
values, are loaded one after another. Two warpgroups alternate: each processes every second tile in its own buffer of 32
keys. While one computes products, the other gathers keys, computes weights and stores them:

    wait for the keys of tile i -> s = q k, dp = do v -> gather of tile i + 2 begins -> p, ds of tile i, stored
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

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

KEYS = gl.constexpr(32)  # of a tile
WARPS = 4
LOG2E = gl.constexpr(1.4426950408889634)
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # a row's 32 numbers by 16 bytes per thread
REGISTERS = gl.constexpr(240)  # per thread of the second warpgroup


@gluon.jit
def _consume(tensors, buffers, sizes, i_turn: gl.constexpr):
    """Write p and ds of every second tile of keys from `i_turn` on."""
    p_k, p_list, p_weights, p_ds, p_lse, p_delta = tensors
    q_wide, q_rest, do, k_wide, k_rest = buffers
    queries, slots, group_size, i_part, t, last, i_program, scale, k_strides = sizes
    dtype: gl.constexpr = p_k.dtype.element_ty
    own_wide, own_rest = k_wide.index(i_turn), k_rest.index(i_turn)
    tokens = listed_rows(p_list, i_turn, slots, KEYS, WIDE_ROWS, REST_ROWS)
    copy_keys(own_wide, own_rest, p_k, tokens, last, k_strides, WIDE_ROWS, REST_ROWS)
    async_copy.commit_group()
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    head = i_part * ROWS + o_row
    inside = head < group_size
    lse = gl.load(p_lse + head.to(gl.int64) * queries + t, mask=inside, other=0.0)
    lse = gl.where(lse == -float("inf"), 0.0, lse) * LOG2E
    delta = gl.load(p_delta + head.to(gl.int64) * queries + t, mask=inside, other=0.0)
    to_row = (i_program.to(gl.int64) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED)))[:, None] * slots
    for i_tile in range(i_turn, gl.cdiv(slots, KEYS), 2):
        tokens = listed_rows(p_list, i_tile + 2, slots, KEYS, WIDE_ROWS, REST_ROWS)
        key = listed_tokens(p_list, i_tile, slots, KEYS, gl.SliceLayout(0, SCORES))
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        token = warpgroup_mma(q_wide, own_wide.permute((1, 0)), zero, use_acc=False, is_async=True)
        token = warpgroup_mma(q_rest, own_rest.permute((1, 0)), token, is_async=True)
        dp_token = warpgroup_mma(do, own_wide.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=[token, dp_token])
        gl.thread_barrier()  # all four warps have read the buffer
        copy_keys(own_wide, own_rest, p_k, tokens, last, k_strides, WIDE_ROWS, REST_ROWS)
        async_copy.commit_group()
        visible = ((key >= 0) & (key <= last))[None, :] & inside[:, None]
        weights = gl.where(visible, gl.exp2(scores * (scale * LOG2E) - lse[:, None]), 0.0)
        ds = weights * (dp - delta[:, None]) * scale
        place = i_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, STORED))
        at, mask = to_row + place[None, :], (place < slots)[None, :]
        gl.store(p_weights + at, gl.convert_layout(weights.to(dtype), STORED), mask=mask)
        gl.store(p_ds + at, gl.convert_layout(ds.to(dtype), STORED), mask=mask)
    async_copy.wait_group(0)


@kernel_launcher
@gluon.jit(do_not_specialize=["queries", "slots", "group_size", "parts", "first_query"])
def _token_latent_scores_kernel(
    p_q,
    p_k,
    p_do,  # (T, Hq, 512)
    p_weights,  # (queries of the launch, parts * ROWS, slots) in q's dtype
    p_ds,  # the same
    p_lse,  # (Hq, T) fp32 contiguous
    p_delta,  # the same
    p_chosen,  # (T, 1, n) int32 contiguous
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    queries,
    slots,
    group_size,  # q heads
    parts,  # programs of a query
    first_query,  # of the launch
    scale,
    q_strides,  # `PackedStrides`
    k_strides,
    do_strides,
):
    i_program = gl.program_id(0)
    i_query, i_part = i_program // parts, i_program % parts
    t = (first_query + i_query).to(gl.int64)
    p_list = p_chosen + t * slots
    last = gl.load(p_position + t)
    p_k += gl.load(p_first_key + t).to(gl.int64) * k_strides.n
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_wide = gl.allocate_shared_memory(dtype, [ROWS, WIDE], TILE)
    q_rest = gl.allocate_shared_memory(dtype, [ROWS, REST], TILE)
    do = gl.allocate_shared_memory(dtype, [ROWS, WIDE], TILE)
    k_wide = gl.allocate_shared_memory(dtype, [2, KEYS, WIDE], TILE)
    k_rest = gl.allocate_shared_memory(dtype, [2, KEYS, REST], TILE)
    copy_heads(q_wide, p_q, t, i_part, group_size, q_strides, 0, WIDE_ROWS)
    copy_heads(q_rest, p_q, t, i_part, group_size, q_strides, WIDE, REST_ROWS)
    copy_heads(do, p_do, t, i_part, group_size, do_strides, 0, WIDE_ROWS)
    fence_async_shared()
    tensors = p_k, p_list, p_weights, p_ds, p_lse, p_delta
    buffers = q_wide, q_rest, do, k_wide, k_rest
    sizes = queries, slots, group_size, i_part, t, last, i_program, scale, k_strides
    gl.warp_specialize(
        [(_consume, (tensors, buffers, sizes, 0)), (_consume, (tensors, buffers, sizes, 1))], [4], [REGISTERS]
    )
