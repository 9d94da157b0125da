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

ROWS, BLOCK_N = gl.constexpr(64), gl.constexpr(64)  # q heads of a program, keys of a tile
WIDE, REST = gl.constexpr(512), gl.constexpr(64)  # columns of keys: those that are values too, and the others
WARPS = 8
LN2 = gl.constexpr(0.6931471805599453)

TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WIDE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))  # a warp copies half a row at once
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))


@gluon.jit
def _listed(p_list, i_tile, slots, layout: gl.constexpr):
    """Return the tokens of tile `i_tile` of a list, -1 for none, [BLOCK_N]."""
    place = i_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    return gl.load(p_list + place, mask=place < slots, other=-1)


@gluon.jit
def _gather(k_wide, k_rest, p_k, key_wide, key_rest, last, stride_kn):
    """Begin to copy the rows of keys to a buffer; rows of tokens that are not there become zero."""
    o_wide = gl.arange(0, WIDE, gl.SliceLayout(0, WIDE_ROWS))
    o_rest = WIDE + gl.arange(0, REST, gl.SliceLayout(0, REST_ROWS))
    there_wide, there_rest = (key_wide >= 0) & (key_wide <= last), (key_rest >= 0) & (key_rest <= last)
    row_wide, row_rest = gl.where(there_wide, key_wide, 0), gl.where(there_rest, key_rest, 0)
    p_wide = p_k + (row_wide.to(gl.int64) * stride_kn)[:, None] + o_wide[None, :]
    p_rest = p_k + (row_rest.to(gl.int64) * stride_kn)[:, None] + o_rest[None, :]
    async_copy.async_copy_global_to_shared(k_wide, p_wide, mask=there_wide[:, None])
    async_copy.async_copy_global_to_shared(k_rest, p_rest, mask=there_rest[:, None])


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
    stride_qn,
    stride_qh,
    stride_kn,
    stride_on,
    stride_oh,
):
    i_program = gl.program_id(0)
    t, i_part = (i_program // parts).to(gl.int64), i_program % parts
    p_list = p_chosen + t * slots
    last = gl.load(p_position + t)
    p_k += gl.load(p_first_key + t).to(gl.int64) * stride_kn
    dtype: gl.constexpr = p_q.dtype.element_ty

    q_wide = gl.allocate_shared_memory(dtype, [ROWS, WIDE], TILE)
    q_rest = gl.allocate_shared_memory(dtype, [ROWS, REST], TILE)
    k_wide = gl.allocate_shared_memory(dtype, [2, BLOCK_N, WIDE], TILE)
    k_rest = gl.allocate_shared_memory(dtype, [2, BLOCK_N, REST], TILE)
    wide_keys: gl.constexpr = gl.SliceLayout(1, WIDE_ROWS)
    rest_keys: gl.constexpr = gl.SliceLayout(1, REST_ROWS)
    score_keys: gl.constexpr = gl.SliceLayout(0, SCORES)

    tiles = gl.cdiv(slots, BLOCK_N)
    _gather(
        k_wide.index(0),
        k_rest.index(0),
        p_k,
        _listed(p_list, 0, slots, wide_keys),
        _listed(p_list, 0, slots, rest_keys),
        last,
        stride_kn,
    )
    async_copy.commit_group()
    next_wide, next_rest = _listed(p_list, 1, slots, wide_keys), _listed(p_list, 1, slots, rest_keys)
    key = _listed(p_list, 0, slots, score_keys)

    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE_ROWS))
    o_wide = gl.arange(0, WIDE, gl.SliceLayout(0, WIDE_ROWS))
    p_rows = p_q + t * stride_qn + head.to(gl.int64)[:, None] * stride_qh
    q_wide.store(gl.load(p_rows + o_wide[None, :], mask=(head < group_size)[:, None], other=0.0))
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, REST_ROWS))
    o_rest = WIDE + gl.arange(0, REST, gl.SliceLayout(0, REST_ROWS))
    p_rows = p_q + t * stride_qn + head.to(gl.int64)[:, None] * stride_qh
    q_rest.store(gl.load(p_rows + o_rest[None, :], mask=(head < group_size)[:, None], other=0.0))

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
            _gather(k_wide.index(other), k_rest.index(other), p_k, next_wide, next_rest, last, stride_kn)
        async_copy.commit_group()
        next_wide = _listed(p_list, i_tile + 2, slots, wide_keys)
        next_rest = _listed(p_list, i_tile + 2, slots, rest_keys)
        there = (key >= 0) & (key <= last)
        key = _listed(p_list, i_tile + 1, slots, score_keys)
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
    p_rows = p_out + t * stride_on + head.to(gl.int64)[:, None] * stride_oh
    o_wide = gl.arange(0, WIDE, gl.SliceLayout(0, SUMS))
    gl.store(p_rows + o_wide[None, :], sums.to(p_out.dtype.element_ty), mask=(head < group_size)[:, None])
