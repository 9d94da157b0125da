# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens of latent attention (MLA) on Hopper: warps that gather, and two warpgroups that alternate.

A program is one query and 64 of its q heads. Values are the first 512 of the keys' 576 numbers. Each turn takes two
tiles of 64 keys:

    gathering warps    rows of keys, by cp.async, each part of a tile as soon as nobody reads the one before it
    warpgroup 0        scores of tile 0, and the sums of columns 0 to 255 of the values of both tiles
    warpgroup 1        scores of tile 1, and the sums of columns 256 to 511

`latent_consume.py` has the order in which the warpgroups work.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dynaxx.kernels.primitives.hopper.signals import NUMBERS, barriers, opaque_zero
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.gather import GATHERED, REST, ROWS, TILE, WIDE, copy_rows, listed_tokens
from dynaxx.trained.tokens.kernels.hopper.latent_consume import (
    HALF,
    KEYS,
    LEFT_0,
    LEFT_1,
    RIGHT_0,
    RIGHT_1,
    Columns,
    Results,
    Shared,
    Sizes,
    consume_first,
    consume_second,
)

WARPS, MAX_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)


@gluon.jit
def _rows_of(p_list, i_tile, slots, last, k_strides):
    """Return where the rows of a tile begin, and which exist."""
    key = listed_tokens(p_list, i_tile, slots, KEYS, gl.SliceLayout(1, GATHERED))
    there = (key >= 0) & (key <= last)
    return gl.where(there, key, 0).to(gl.int64) * k_strides.n, there


@gluon.jit
def _produce(p_k, p_list, tile_0, tile_1, full, empty, slots, last, k_strides, turns):
    """Gather all tiles, in the order in which their parts become free."""
    row_0, there_0 = _rows_of(p_list, 0, slots, last, k_strides)
    row_1, there_1 = _rows_of(p_list, 1, slots, last, k_strides)
    for i_turn in range(turns):
        i = opaque_zero(i_turn)
        phase = (i_turn & 1) ^ 1
        mbarrier.wait(empty.index(LEFT_0), phase)
        copy_rows(tile_0.left.index(i), p_k, row_0, there_0, 0, GATHERED)
        async_copy.mbarrier_arrive(full.index(LEFT_0), increment_count=False)
        mbarrier.wait(empty.index(RIGHT_1), phase)
        copy_rows(tile_1.right.index(i), p_k, row_1, there_1, HALF, GATHERED)
        async_copy.mbarrier_arrive(full.index(RIGHT_1), increment_count=False)
        mbarrier.wait(empty.index(RIGHT_0), phase)
        copy_rows(tile_0.right.index(i), p_k, row_0, there_0, HALF, GATHERED)
        copy_rows(tile_0.rest.index(i), p_k, row_0, there_0, WIDE, GATHERED)
        async_copy.mbarrier_arrive(full.index(RIGHT_0), increment_count=False)
        row_0, there_0 = _rows_of(p_list, 2 * i_turn + 2, slots, last, k_strides)
        mbarrier.wait(empty.index(LEFT_1), phase)
        copy_rows(tile_1.left.index(i), p_k, row_1, there_1, 0, GATHERED)
        copy_rows(tile_1.rest.index(i), p_k, row_1, there_1, WIDE, GATHERED)
        async_copy.mbarrier_arrive(full.index(LEFT_1), increment_count=False)
        row_1, there_1 = _rows_of(p_list, 2 * i_turn + 3, slots, last, k_strides)
    async_copy.wait_group(0)


@gluon.jit
def _columns(dtype: gl.constexpr, rows: gl.constexpr):
    """Allocate [1, rows, 576] in parts; the index of 1 is what `opaque_zero` of `signals.py` needs."""
    return Columns(
        left=gl.allocate_shared_memory(dtype, [1, rows, HALF], TILE),
        right=gl.allocate_shared_memory(dtype, [1, rows, HALF], TILE),
        rest=gl.allocate_shared_memory(dtype, [1, rows, REST], TILE),
    )


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
    turns = gl.maximum(gl.cdiv(slots, 2 * KEYS), 1)
    dtype: gl.constexpr = p_q.dtype.element_ty
    q, tile_0, tile_1 = _columns(dtype, ROWS), _columns(dtype, KEYS), _columns(dtype, KEYS)
    numbers = gl.allocate_shared_memory(gl.float32, [2, ROWS], NUMBERS)
    full, empty = barriers(4, 128), barriers(4, 1)
    shared = Shared(
        q=q,
        tile_0=tile_0,
        tile_1=tile_1,
        numbers=numbers,
        full=full,
        empty=empty,
        numbers_ready=barriers(2, 1),
        weights_ready=barriers(2, 1),
        q_ready=barriers(1, 256),
    )
    results = Results(p_q=p_q + t * q_strides.n, p_out=p_out + t * out_strides.n, p_lse=p_lse + t)
    sizes = Sizes(
        slots=slots,
        turns=turns,
        last=last,
        scale_log2=scale_log2,
        queries=queries,
        first_head=i_part * ROWS,
        group_size=group_size,
        q_stride=q_strides.h,
        out_stride=out_strides.h,
    )
    gl.warp_specialize(
        [
            (consume_first, (shared, p_list, results, sizes)),
            (consume_second, (shared, p_list, results, sizes)),
            (_produce, (p_k, p_list, tile_0, tile_1, full, empty, slots, last, k_strides, turns)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
