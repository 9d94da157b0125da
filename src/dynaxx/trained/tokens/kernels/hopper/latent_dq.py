# SPDX-License-Identifier: Apache-2.0
"""Second step of the backward over chosen tokens of latent attention: dq = ds k.

A program is one query, 128 of its q heads and half of the columns of dq: 256 of the first 512, and 32 of the rest.

    gathering warps     64 rows of keys and a tile of ds, by cp.async, into one of four buffers
    two warpgroups      dq += ds k, 64 q heads each
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

from dynaxx.kernels.compat import barrier, copy_to_shared
from dynaxx.kernels.primitives.hopper.signals import barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.gather import GATHERED, ROWS, TILE, WIDE, copy_rows, listed_tokens

KEYS = gl.constexpr(64)  # keys per tile
BUFFERS = gl.constexpr(4)
HALF, HALF_REST = gl.constexpr(256), gl.constexpr(32)  # columns of a program
WARPS, MAX_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)
NARROW_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
REST_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.jit
def _produce(p_k, p_list, p_ds, buffers, full, empty, slots, width, last, i_half, k_strides):
    """Gather all tiles."""
    k_wide, k_rest, ds = buffers
    key_wide = listed_tokens(p_list, 0, slots, KEYS, gl.SliceLayout(1, GATHERED))
    key_rest = listed_tokens(p_list, 0, slots, KEYS, gl.SliceLayout(1, NARROW))
    row_ds = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, GATHERED)).to(gl.int64) * width
    for i_tile in range(gl.cdiv(slots, KEYS)):
        buffer = i_tile % BUFFERS
        there_wide, there_rest = (key_wide >= 0) & (key_wide <= last), (key_rest >= 0) & (key_rest <= last)
        row_wide = gl.where(there_wide, key_wide, 0).to(gl.int64) * k_strides.n + i_half * HALF
        row_rest = gl.where(there_rest, key_rest, 0).to(gl.int64) * k_strides.n + i_half * HALF_REST
        key_wide = listed_tokens(p_list, i_tile + 1, slots, KEYS, gl.SliceLayout(1, GATHERED))
        key_rest = listed_tokens(p_list, i_tile + 1, slots, KEYS, gl.SliceLayout(1, NARROW))
        mbarrier.wait(empty.index(buffer), ((i_tile // BUFFERS) & 1) ^ 1)
        copy_rows(k_wide.index(buffer), p_k, row_wide, there_wide, 0, GATHERED)
        copy_rows(k_rest.index(buffer), p_k, row_rest, there_rest, WIDE, NARROW)
        place = i_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, GATHERED))
        p_tile = p_ds + row_ds[:, None] + place[None, :]
        copy_to_shared(ds.index(buffer), p_tile, mask=(place < width)[None, :])
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _consume(p_dq, buffers, signals, slots, sizes, OWN: gl.constexpr):
    """Add up dq of 64 q heads."""
    k_wide, k_rest, ds = buffers
    full, empty, done = signals
    group_size, i_part, i_half, dq_strides = sizes
    dtype: gl.constexpr = ds.dtype
    sums = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    rest_sums = gl.zeros([ROWS, HALF_REST], gl.float32, REST_SUMS)
    for i_tile in range(gl.cdiv(slots, KEYS)):
        buffer = i_tile % BUFFERS
        mbarrier.wait(full.index(buffer), (i_tile // BUFFERS) & 1)
        fence_async_shared()
        own = ds.index(buffer).slice(OWN * ROWS, ROWS, dim=0)
        acc = warpgroup_mma(own, k_wide.index(buffer), sums, is_async=True)
        rest_acc = warpgroup_mma(own, k_rest.index(buffer), rest_sums, is_async=True)
        sums, rest_sums = warpgroup_mma_wait(0, deps=[acc, rest_acc])
        barrier()  # all warps have read the buffer
        mbarrier.arrive(empty.index(buffer), count=1)
    mbarrier.arrive(done.index(0), count=1)
    mbarrier.wait(done.index(0), 0)
    first = (2 * i_part + OWN) * ROWS
    head = first + gl.arange(0, ROWS, gl.SliceLayout(1, REST_SUMS))
    column = WIDE + i_half * HALF_REST + gl.arange(0, HALF_REST, gl.SliceLayout(0, REST_SUMS))
    p_rows = p_dq + head.to(gl.int64)[:, None] * dq_strides.h + column[None, :]
    gl.store(p_rows, rest_sums.to(dtype), mask=(head < group_size)[:, None])
    tile = k_wide.index(OWN)
    tile.store(sums.to(dtype))
    head = first + gl.arange(0, ROWS, gl.SliceLayout(1, GATHERED))
    column = i_half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, GATHERED))
    p_rows = p_dq + head.to(gl.int64)[:, None] * dq_strides.h + column[None, :]
    gl.store(p_rows, tile.load(GATHERED), mask=(head < group_size)[:, None])


@kernel_launcher
@gluon.jit(do_not_specialize=["slots", "group_size", "pairs", "first_query"])
def _token_latent_dq_kernel(
    p_k,
    p_dq,  # (T, Hq, 576)
    p_ds,  # (queries of the launch, pairs * 2 * ROWS, width)
    p_chosen,  # (T, 1, n) int32 contiguous
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    slots,
    width,
    group_size,  # q heads
    pairs,  # pairs of parts of a query's q heads
    first_query,  # first query of the launch
    k_strides,  # `PackedStrides`
    dq_strides,
):
    i_program = gl.program_id(0)
    i_half, i_cell = i_program % 2, i_program // 2
    i_query, i_part = i_cell // pairs, i_cell % pairs
    t = (first_query + i_query).to(gl.int64)
    p_list = p_chosen + t * slots
    last = gl.load(p_position + t)
    p_k += gl.load(p_first_key + t).to(gl.int64) * k_strides.n
    p_ds += i_cell.to(gl.int64) * (2 * ROWS) * width
    p_dq += t * dq_strides.n
    dtype: gl.constexpr = p_k.dtype.element_ty
    k_wide = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, HALF], TILE)
    k_rest = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, HALF_REST], NARROW_TILE)
    ds = gl.allocate_shared_memory(dtype, [BUFFERS, 2 * ROWS, KEYS], TILE)
    full, empty, done = barriers(BUFFERS, 128), barriers(BUFFERS, 2), barriers(1, 2)
    buffers, signals = (k_wide, k_rest, ds), (full, empty, done)
    sizes = group_size, i_part, i_half, dq_strides
    gl.warp_specialize(
        [
            (_consume, (p_dq, buffers, signals, slots, sizes, 0)),
            (_consume, (p_dq, buffers, signals, slots, sizes, 1)),
            (_produce, (p_k, p_list, p_ds, buffers, full, empty, slots, width, last, i_half, k_strides)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
