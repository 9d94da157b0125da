# SPDX-License-Identifier: Apache-2.0
"""First step of the backward over chosen tokens of latent attention: weights p and their gradients ds, to memory.

A program is one query and 64 of its q heads. q and do stay in registers, so that all shared memory holds keys, whose
first 512 columns are the values:

    gathering warps     64 rows of keys, by cp.async, into one of three buffers
    warpgroup 0         s = q k -> p, to shared memory and from there to global memory
    warpgroup 1         dp = do v -> ds = p (dp - delta), the same way, over the tile of p
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

from dynaxx.kernels.compat import barrier
from dynaxx.kernels.primitives.hopper.signals import barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.gather import (
    GATHERED,
    REST,
    ROWS,
    TILE,
    WIDE,
    copy_heads,
    copy_rows,
    listed_tokens,
)

KEYS = gl.constexpr(64)  # keys per tile
BUFFERS = gl.constexpr(3)
WARPS, MAX_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)
LOG2E = gl.constexpr(1.4426950408889634)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def _produce(p_k, p_list, k_wide, k_rest, full, empty, slots, last, k_strides):
    """Gather all tiles."""
    keys: gl.constexpr = gl.SliceLayout(1, GATHERED)
    key = listed_tokens(p_list, 0, slots, KEYS, keys)
    for i_tile in range(gl.cdiv(slots, KEYS)):
        there = (key >= 0) & (key <= last)
        row = gl.where(there, key, 0).to(gl.int64) * k_strides.n
        key = listed_tokens(p_list, i_tile + 1, slots, KEYS, keys)
        buffer = i_tile % BUFFERS
        mbarrier.wait(empty.index(buffer), (i_tile // BUFFERS) & 1)
        copy_rows(k_wide.index(buffer), p_k, row, there, 0, GATHERED)
        copy_rows(k_rest.index(buffer), p_k, row, there, WIDE, GATHERED)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _store(p_rows, tile, i_tile, width):
    """Write a tile [ROWS, KEYS] to the rows of a program."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, GATHERED)).to(gl.int64) * width
    place = i_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, GATHERED))
    gl.store(p_rows + row[:, None] + place[None, :], tile, mask=(place < width)[None, :])


@gluon.jit
def _write_weights(tensors, buffers, signals, sizes):
    """Write p of all tiles."""
    p_q, p_list, p_weights, p_lse = tensors
    k_wide, k_rest, tile = buffers
    full, empty, tile_full, tile_empty = signals
    queries, slots, width, group_size, i_part, t, last, scale, q_strides = sizes
    dtype: gl.constexpr = tile.dtype
    copy_heads(k_wide.index(0), p_q, t, i_part, group_size, q_strides, 0)
    copy_heads(k_rest.index(0), p_q, t, i_part, group_size, q_strides, WIDE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    q_wide, q_rest = k_wide.index(0).load(LEFT), k_rest.index(0).load(LEFT)
    barrier()
    for i in gl.static_range(BUFFERS):
        mbarrier.arrive(empty.index(i), count=1)
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    lse = gl.load(p_lse + head.to(gl.int64) * queries + t, mask=head < group_size, other=-float("inf"))
    lse = gl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
    for i_tile in range(gl.cdiv(slots, KEYS)):
        buffer = i_tile % BUFFERS
        mbarrier.wait(full.index(buffer), (i_tile // BUFFERS) & 1)
        fence_async_shared()
        zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        token = warpgroup_mma(q_wide, k_wide.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
        token = warpgroup_mma(q_rest, k_rest.index(buffer).permute((1, 0)), token, is_async=True)
        key = listed_tokens(p_list, i_tile, slots, KEYS, gl.SliceLayout(0, SCORES))
        there = (key >= 0) & (key <= last)
        scores = warpgroup_mma_wait(0, deps=[token])
        barrier()  # all warps have read the buffer
        mbarrier.arrive(empty.index(buffer), count=1)
        weights = gl.exp2(scores * (scale * LOG2E) - lse[:, None])
        weights = gl.where(there[None, :], weights, 0.0).to(dtype)
        mbarrier.wait(tile_empty.index(0), (i_tile & 1) ^ 1)
        tile.store(weights)
        rows = tile.load(GATHERED)
        barrier()
        mbarrier.arrive(tile_full.index(0), count=1)
        _store(p_weights, rows, i_tile, width)


@gluon.jit
def _write_gradients(tensors, buffers, signals, sizes):
    """Write ds of all tiles."""
    p_do, p_ds, p_delta = tensors
    k_wide, tile = buffers
    full, empty, tile_full, tile_empty = signals
    queries, slots, width, group_size, i_part, t, scale, do_strides = sizes
    dtype: gl.constexpr = tile.dtype
    copy_heads(k_wide.index(1), p_do, t, i_part, group_size, do_strides, 0)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    do = k_wide.index(1).load(LEFT)
    barrier()
    for i in gl.static_range(BUFFERS):
        mbarrier.arrive(empty.index(i), count=1)
    head = i_part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    delta = gl.load(p_delta + head.to(gl.int64) * queries + t, mask=head < group_size, other=0.0)
    for i_tile in range(gl.cdiv(slots, KEYS)):
        buffer = i_tile % BUFFERS
        mbarrier.wait(full.index(buffer), (i_tile // BUFFERS) & 1)
        fence_async_shared()
        zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        token = warpgroup_mma(do, k_wide.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=[token])
        barrier()  # all warps have read the buffer
        mbarrier.arrive(empty.index(buffer), count=1)
        mbarrier.wait(tile_full.index(0), i_tile & 1)
        weights = tile.load(SCORES).to(gl.float32)
        ds = weights * (dp - delta[:, None]) * scale
        tile.store(ds.to(dtype))
        rows = tile.load(GATHERED)
        barrier()
        mbarrier.arrive(tile_empty.index(0), count=1)
        _store(p_ds, rows, i_tile, width)


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
    width,  # slots, for which Triton specializes the kernel
    group_size,  # q heads
    parts,  # programs of a query
    first_query,  # first query of the launch
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
    first_row = i_program.to(gl.int64) * ROWS * width
    dtype: gl.constexpr = p_q.dtype.element_ty
    k_wide = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, WIDE], TILE)
    k_rest = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, REST], TILE)
    tile = gl.allocate_shared_memory(dtype, [ROWS, KEYS], TILE)
    full, empty = barriers(BUFFERS, 128), barriers(BUFFERS, 2)
    signals = full, empty, barriers(1, 1), barriers(1, 1)
    gl.warp_specialize(
        [
            (
                _write_weights,
                (
                    (p_q, p_list, p_weights + first_row, p_lse),
                    (k_wide, k_rest, tile),
                    signals,
                    (queries, slots, width, group_size, i_part, t, last, scale, q_strides),
                ),
            ),
            (
                _write_gradients,
                (
                    (p_do, p_ds + first_row, p_delta),
                    (k_wide, tile),
                    signals,
                    (queries, slots, width, group_size, i_part, t, scale, do_strides),
                ),
            ),
            (_produce, (p_k, p_list, k_wide, k_rest, full, empty, slots, last, k_strides)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
