# SPDX-License-Identifier: Apache-2.0
"""Third step of the backward over chosen tokens of latent attention: each query's part of dk, a row per listed key.

A program is one query, 128 of its q heads and half of the columns: 256 of the first 512, to which p' do adds, and 32 of
the rest. q and do stay in shared memory:

    copying warps       q and do; tiles of 64 keys of p and ds, by cp.async, into one of two buffers
    two warpgroups      rows = ds' q + p' do of every second tile -> memory
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

from dynaxx.kernels.compat import barrier, copy_to_shared, reinterpret
from dynaxx.kernels.primitives.hopper.signals import barriers, opaque_zero
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.gather import GATHERED, ROWS, TILE, WIDE, copy_rows
from dynaxx.trained.tokens.kernels.hopper.latent_dq import HALF, HALF_REST, NARROW, NARROW_TILE, REST_SUMS, SUMS

KEYS = gl.constexpr(64)  # keys per tile
BUFFERS = gl.constexpr(2)
WARPS, MAX_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)


@gluon.jit
def _produce(p_q, p_do, p_weights, p_ds, buffers, signals, sizes):
    """Copy q and do, and all tiles of p and ds."""
    q_wide, q_rest, do, tiles = buffers
    full, empty, resident = signals
    slots, width, group_size, i_part, i_half, q_strides, do_strides = sizes
    head = i_part * (2 * ROWS) + gl.arange(0, 2 * ROWS, gl.SliceLayout(1, GATHERED))
    row = head.to(gl.int64)
    copy_rows(q_wide.index(0), p_q, row * q_strides.h + i_half * HALF, head < group_size, 0, GATHERED)
    copy_rows(do.index(0), p_do, row * do_strides.h + i_half * HALF, head < group_size, 0, GATHERED)
    head = i_part * (2 * ROWS) + gl.arange(0, 2 * ROWS, gl.SliceLayout(1, NARROW))
    row_rest = head.to(gl.int64) * q_strides.h + i_half * HALF_REST
    copy_rows(q_rest.index(0), p_q, row_rest, head < group_size, WIDE, NARROW)
    async_copy.mbarrier_arrive(resident.index(0), increment_count=False)
    row = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, GATHERED)).to(gl.int64) * width
    for i_tile in range(gl.cdiv(slots, KEYS)):
        buffer = i_tile % BUFFERS
        place = i_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, GATHERED))
        at, mask = row[:, None] + place[None, :], (place < width)[None, :]
        mbarrier.wait(empty.index(buffer), ((i_tile // BUFFERS) & 1) ^ 1)
        copy_to_shared(tiles.index(2 * buffer), p_ds + at, mask=mask)
        copy_to_shared(tiles.index(2 * buffer + 1), p_weights + at, mask=mask)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _consume(p_rows, buffers, signals, slots, i_half, OWN: gl.constexpr):
    """Write the rows of every second tile, by way of the memory of its p and ds."""
    q_wide, q_rest, do, tiles = buffers
    full, empty, resident = signals
    dtype: gl.constexpr = do.dtype
    staged = reinterpret(tiles, dtype, [BUFFERS, KEYS, HALF], TILE).index(OWN)
    COLUMNS: gl.constexpr = 2 * HALF + 2 * HALF_REST
    mbarrier.wait(resident.index(0), 0)
    for i_tile in range(OWN, gl.cdiv(slots, KEYS), 2):
        i = opaque_zero(i_tile)
        mbarrier.wait(full.index(OWN), (i_tile // BUFFERS) & 1)
        fence_async_shared()
        own_ds, own_weights = tiles.index(2 * OWN).permute((1, 0)), tiles.index(2 * OWN + 1).permute((1, 0))
        zero = gl.zeros([KEYS, HALF], gl.float32, SUMS)
        rest_zero = gl.zeros([KEYS, HALF_REST], gl.float32, REST_SUMS)
        acc = warpgroup_mma(own_ds, q_wide.index(i), zero, use_acc=False, is_async=True)
        rest_acc = warpgroup_mma(own_ds, q_rest.index(i), rest_zero, use_acc=False, is_async=True)
        acc = warpgroup_mma(own_weights, do.index(i), acc, is_async=True)
        sums, rest_sums = warpgroup_mma_wait(0, deps=[acc, rest_acc])
        barrier()  # all warps have read the buffer
        staged.store(sums.to(dtype))
        rows = staged.load(GATHERED)
        barrier()
        mbarrier.arrive(empty.index(OWN), count=1)
        place = i_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, REST_SUMS))
        column = WIDE + i_half * HALF_REST + gl.arange(0, HALF_REST, gl.SliceLayout(0, REST_SUMS))
        to = place.to(gl.int64)[:, None] * COLUMNS + column[None, :]
        gl.store(p_rows + to, rest_sums.to(dtype), mask=(place < slots)[:, None])
        place = i_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, GATHERED))
        column = i_half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, GATHERED))
        to = place.to(gl.int64)[:, None] * COLUMNS + column[None, :]
        gl.store(p_rows + to, rows, mask=(place < slots)[:, None])


@kernel_launcher
@gluon.jit(do_not_specialize=["slots", "group_size", "pairs", "first_query"])
def _token_latent_rows_kernel(
    p_q,
    p_do,  # (T, Hq, 512)
    p_weights,  # (queries of the launch, pairs * 2 * ROWS, width)
    p_ds,  # the same
    p_rows,  # (queries of the launch, pairs, slots, 576)
    slots,
    width,
    group_size,  # q heads
    pairs,  # pairs of parts of a query's q heads
    first_query,  # first query of the launch
    q_strides,  # `PackedStrides`
    do_strides,
):
    i_program = gl.program_id(0)
    i_half, i_cell = i_program % 2, i_program // 2
    i_query, i_part = i_cell // pairs, i_cell % pairs
    t = (first_query + i_query).to(gl.int64)
    first = i_cell.to(gl.int64) * (2 * ROWS) * width
    p_rows += i_cell.to(gl.int64) * slots * (2 * HALF + 2 * HALF_REST)
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_wide = gl.allocate_shared_memory(dtype, [1, 2 * ROWS, HALF], TILE)
    do = gl.allocate_shared_memory(dtype, [1, 2 * ROWS, HALF], TILE)
    q_rest = gl.allocate_shared_memory(dtype, [1, 2 * ROWS, HALF_REST], NARROW_TILE)
    tiles = gl.allocate_shared_memory(dtype, [2 * BUFFERS, 2 * ROWS, KEYS], TILE)  # ds, p
    signals = barriers(BUFFERS, 128), barriers(BUFFERS, 1), barriers(1, 128)
    buffers = q_wide, q_rest, do, tiles
    sizes = slots, width, group_size, i_part, i_half, q_strides, do_strides
    gl.warp_specialize(
        [
            (_consume, (p_rows, buffers, signals, slots, i_half, 0)),
            (_consume, (p_rows, buffers, signals, slots, i_half, 1)),
            (
                _produce,
                (
                    p_q + t * q_strides.n,
                    p_do + t * do_strides.n,
                    p_weights + first,
                    p_ds + first,
                    buffers,
                    signals,
                    sizes,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
