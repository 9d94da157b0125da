# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens of latent attention (MLA) on Hopper: warps that gather, and two warpgroups that compute.

A program is one query and 64 of its q heads. Values are the first 512 of the keys' 576 numbers. Each turn takes two
tiles of 32 keys:

    gathering warps      rows of keys, by cp.async, into four buffers of 32 keys
    warpgroup 0 and 1    s = q k of its own tile -> maxima meet -> p of its own tile, to shared memory
                         -> out += p v of both tiles, for its own 256 columns of the values

The copies of a tile have a whole iteration to complete, and a softmax needs one exchange of maxima per iteration.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.hopper.primitives.signals import NUMBERS, barriers
from dynaxx.kernels.hopper.tokens.gather import REST, ROWS, TILE, WIDE, copy_heads, listed_tokens

KEYS = gl.constexpr(32)  # of a tile
BUFFERS = gl.constexpr(4)
HALF = gl.constexpr(256)  # columns of the values that a warpgroup adds up
WARPS, MOST_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)
LN2 = gl.constexpr(0.6931471805599453)
HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))  # a warp copies half a row at once
REST_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
P_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


@gluon.jit
def _copy(buffer, p_k, key, last, k_strides, FIRST: gl.constexpr, layout: gl.constexpr):
    """Start copying columns of the rows of keys, from column FIRST on; rows of missing tokens become 0."""
    column = FIRST + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    there = (key >= 0) & (key <= last)
    p_rows = p_k + (gl.where(there, key, 0).to(gl.int64) * k_strides.n)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(buffer, p_rows, mask=there[:, None])


@gluon.jit
def _produce(p_k, p_list, k_halves, k_rests, full, empty, slots, last, k_strides):
    """Gather all tiles."""
    half_keys: gl.constexpr = gl.SliceLayout(1, HALF_ROWS)
    rest_keys: gl.constexpr = gl.SliceLayout(1, REST_ROWS)
    key_half = listed_tokens(p_list, 0, slots, KEYS, half_keys)
    key_rest = listed_tokens(p_list, 0, slots, KEYS, rest_keys)
    for i_tile in range(2 * gl.cdiv(slots, 2 * KEYS)):
        buffer = i_tile % BUFFERS
        mbarrier.wait(empty.index(buffer), ((i_tile // BUFFERS) & 1) ^ 1)
        _copy(k_halves.index(2 * buffer), p_k, key_half, last, k_strides, 0, HALF_ROWS)
        _copy(k_halves.index(2 * buffer + 1), p_k, key_half, last, k_strides, HALF, HALF_ROWS)
        _copy(k_rests.index(buffer), p_k, key_rest, last, k_strides, WIDE, REST_ROWS)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
        key_half = listed_tokens(p_list, i_tile + 1, slots, KEYS, half_keys)
        key_rest = listed_tokens(p_list, i_tile + 1, slots, KEYS, rest_keys)
    async_copy.wait_group(0)


@gluon.jit
def _exchanged(numbers, ready, values, i_turn, OWN: gl.constexpr):
    """Return the other warpgroup's `values` [ROWS] of an iteration."""
    numbers.index(OWN).store(values)
    gl.thread_barrier()
    mbarrier.arrive(ready.index(OWN), count=1)
    mbarrier.wait(ready.index(1 - OWN), i_turn & 1)
    return numbers.index(1 - OWN).load(ROW)


@gluon.jit
def _consume(tensors, buffers, signals, sizes, OWN: gl.constexpr):
    """Compute the scores of every second tile, and the sums of 256 columns of all values."""
    p_out, p_lse, p_list = tensors
    q_wide, q_rest, k_halves, k_rests, weight_tiles, numbers = buffers
    full, empty, maxima_ready, weights_ready = signals
    queries, slots, group_size, i_part, t, last, scale_log2, out_strides = sizes
    dtype: gl.constexpr = q_wide.dtype
    score_keys: gl.constexpr = gl.SliceLayout(0, SCORES)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    sums = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    key = listed_tokens(p_list, OWN, slots, KEYS, score_keys)
    turns = gl.cdiv(slots, 2 * KEYS)
    for i_turn in range(turns):
        own, other = 2 * (i_turn % 2) + OWN, 2 * (i_turn % 2) + 1 - OWN
        mbarrier.wait(full.index(own), (i_turn // 2) & 1)
        fence_async_shared()
        zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        token = warpgroup_mma(
            q_wide.slice(0, HALF, dim=1), k_halves.index(2 * own).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        token = warpgroup_mma(
            q_wide.slice(HALF, HALF, dim=1), k_halves.index(2 * own + 1).permute((1, 0)), token, is_async=True
        )
        token = warpgroup_mma(q_rest, k_rests.index(own).permute((1, 0)), token, is_async=True)
        there = (key >= 0) & (key <= last)
        key = listed_tokens(p_list, 2 * i_turn + 2 + OWN, slots, KEYS, score_keys)
        scores = warpgroup_mma_wait(0, deps=[token])
        scores = gl.where(there[None, :], scores * scale_log2, -float("inf"))
        own_max = gl.maximum(row_max, gl.max(scores, 1))
        new_max = gl.maximum(own_max, _exchanged(numbers, maxima_ready, own_max, i_turn, OWN))
        shift = gl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - shift)
        weights = gl.exp2(scores - shift[:, None])
        weight_tiles.index(OWN).store(weights.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(weights_ready.index(OWN), count=1)
        row_sum = row_sum * rescale + gl.sum(weights, 1)
        row_max = new_max
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
        mbarrier.wait(full.index(other), (i_turn // 2) & 1)
        mbarrier.wait(weights_ready.index(1 - OWN), i_turn & 1)
        fence_async_shared()
        acc = warpgroup_mma(weight_tiles.index(OWN), k_halves.index(2 * own + OWN), sums, is_async=True)
        acc = warpgroup_mma(weight_tiles.index(1 - OWN), k_halves.index(2 * other + OWN), acc, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()  # all warps have read the buffers
        mbarrier.arrive(empty.index(own), count=1)
        mbarrier.arrive(empty.index(other), count=1)
    row_sum += _exchanged(numbers, maxima_ready, row_sum, turns, OWN)
    empty_row = row_sum == 0
    total = gl.where(empty_row, 1.0, row_sum)
    head = i_part * ROWS + gl.arange(0, ROWS, ROW)
    if OWN == 0:
        lse = gl.where(empty_row, -float("inf"), row_max * LN2 + gl.log(total))
        gl.store(p_lse + head.to(gl.int64) * queries + t, lse, mask=head < group_size)
    sums = sums / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    p_rows = p_out + t * out_strides.n + head.to(gl.int64)[:, None] * out_strides.h
    column = OWN * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
    gl.store(p_rows + column[None, :], sums.to(dtype), mask=(head < group_size)[:, None])


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
    k_halves = gl.allocate_shared_memory(dtype, [2 * BUFFERS, KEYS, HALF], TILE)
    k_rests = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, REST], TILE)
    weight_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, KEYS], P_TILE)
    numbers = gl.allocate_shared_memory(gl.float32, [2, ROWS], NUMBERS)
    full, empty = barriers(BUFFERS, 128), barriers(BUFFERS, 2)
    maxima_ready, weights_ready = barriers(2, 1), barriers(2, 1)
    copy_heads(q_wide, p_q, t, i_part, group_size, q_strides, 0, HALF_ROWS)
    copy_heads(q_rest, p_q, t, i_part, group_size, q_strides, WIDE, REST_ROWS)
    fence_async_shared()
    tensors = p_out, p_lse, p_list
    buffers = q_wide, q_rest, k_halves, k_rests, weight_tiles, numbers
    signals = full, empty, maxima_ready, weights_ready
    sizes = queries, slots, group_size, i_part, t, last, scale_log2, out_strides
    gl.warp_specialize(
        [
            (_consume, (tensors, buffers, signals, sizes, 0)),
            (_consume, (tensors, buffers, signals, sizes, 1)),
            (_produce, (p_k, p_list, k_halves, k_rests, full, empty, slots, last, k_strides)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
