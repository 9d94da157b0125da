# SPDX-License-Identifier: Apache-2.0
"""Backward over chosen tokens of grouped-query heads on Hopper: dq, and what each tile adds to dk and dv.

A program is a tile of `grouped.py`, 128 rows of q and do in shared memory, and the union of what its queries chose, 64
keys at a time:

    gathering warps      rows of k and v, by cp.async, into three buffers of 64 keys each

The list begins with keys that only one warpgroup needs (`grouped_order.py`), every second 64 for each:

    warpgroup 0 or 1     s = q k, dp = do v of its 64 rows -> p and ds; dq += ds k
                         rows of dv = p do and of dk = ds q over its 64 rows -> memory

Both process the other keys:

    warpgroup 0 and 1    s = q k, dp = do v of 64 rows -> p and ds, which both write to shared memory; dq += ds k
    warpgroup 0          rows of dv = p do over all 128 rows -> memory
    warpgroup 1          rows of dk = ds q over all 128 rows -> memory

Here p and ds have two buffers each, and rows are made one turn later, so that a warpgroup need not wait for the other's
p and ds. Rows go to memory from registers, while the scores of the next keys are computed. `gpu/sums.py` adds
the rows of each key.
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
from dynaxx.kernels.primitives.hopper.signals import barriers, opaque_zero
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.gather import TILE, listed_tokens
from dynaxx.trained.tokens.kernels.hopper.grouped import (
    COLUMN,
    KEYS,
    LN2,
    MARKS,
    ONE_EACH,
    ROW,
    ROWS,
    SCORES,
    _copy_layout,
    _seen,
)

BUFFERS = gl.constexpr(3)
LINES = gl.constexpr(  # rows to store: a thread holds 8 neighbouring columns, eight threads hold 64
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [1, 0], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
WARPS, MAX_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(56)


@gluon.jit
def _gather(buffer, full, p_x, row, there, column, strides):
    """Start copying rows of 64 keys, and signal their arrival."""
    copy_to_shared(buffer, p_x + (row * strides.n)[:, None] + column[None, :], mask=there[:, None])
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _produce(p_k, p_v, p_list, p_marks, buffers, signals, count, last, k_strides, v_strides):
    """Gather all keys and values, and their marks; those of missing tokens become 0."""
    k_buffers, v_buffers, marks = buffers[2], buffers[3], buffers[4]
    k_full, k_empty, v_full, v_empty = signals[0], signals[1], signals[2], signals[3]
    layout: gl.constexpr = _copy_layout(k_buffers.shape[2])
    column = gl.arange(0, k_buffers.shape[2], gl.SliceLayout(0, layout))
    key = listed_tokens(p_list, 0, count, KEYS, gl.SliceLayout(1, layout))
    for i in range(gl.cdiv(count, KEYS)):
        buffer = i % BUFFERS
        there = (key >= 0) & (key <= last)
        row = gl.where(there, key, 0).to(gl.int64)
        key = listed_tokens(p_list, i + 1, count, KEYS, gl.SliceLayout(1, layout))
        mbarrier.wait(v_empty.index(buffer), (i // BUFFERS & 1) ^ 1)
        _gather(v_buffers.index(buffer), v_full.index(buffer), p_v, row, there, column, v_strides)
        mbarrier.wait(k_empty.index(buffer), (i // BUFFERS & 1) ^ 1)
        o_mark = i * KEYS + gl.arange(0, KEYS, ONE_EACH)
        copy_to_shared(marks.index(buffer), p_marks + o_mark, mask=o_mark < count)
        _gather(k_buffers.index(buffer), k_full.index(buffer), p_k, row, there, column, k_strides)
    async_copy.wait_group(0)


@gluon.jit
def _await_keys(signals, i):
    """Wait until a buffer of keys and values has arrived. A fence must follow."""
    buffer = i % BUFFERS
    mbarrier.wait(signals[2].index(buffer), i // BUFFERS & 1)
    mbarrier.wait(signals[0].index(buffer), i // BUFFERS & 1)


@gluon.jit
def _products(buffers, i, OWN: gl.constexpr):
    """Start q k and do v of a buffer of keys that has arrived."""
    q_tiles, do_tiles, k_buffers, v_buffers = buffers[0], buffers[1], buffers[2], buffers[3]
    buffer = i % BUFFERS
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    own = OWN + opaque_zero(i)
    dp = warpgroup_mma(do_tiles.index(own), v_buffers.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(q_tiles.index(own), k_buffers.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _rows_of_keys(weights, x, slot, i):
    """Start p do or ds q, over the rows of both warpgroups, for each key."""
    D: gl.constexpr = x.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([KEYS, D], gl.float32, SUMS)
    left, right = weights.index(2 * slot).permute((1, 0)), weights.index(2 * slot + 1).permute((1, 0))
    rows = warpgroup_mma(left, x.index(opaque_zero(i)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(right, x.index(1 + opaque_zero(i)), rows, is_async=True)


@gluon.jit
def _store_rows(p_rows, rows, i, count, FIRST: gl.constexpr):
    """Write rows of a tile of keys, from column FIRST on, in an order that `_in_order` of `gpu/sums.py` undoes.

    A thread has columns 8 j + 2 t and 8 j + 2 t + 1 of a row, for j from 0 to 15. Columns go to memory in the order of
    j // 4, t, j % 4, so that a thread has 16 bytes that follow each other, and four threads have 64. Threads of
    neighbouring rows exchange halves, so that eight threads write 128 bytes of a row: a line of the cache.
    """
    D: gl.constexpr = rows.shape[1]
    rows = gl.permute(gl.reshape(rows, [KEYS, D // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
    rows = gl.convert_layout(gl.reshape(rows, [KEYS, D]), LINES)
    at = i * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LINES))
    column = FIRST + gl.arange(0, D, gl.SliceLayout(0, LINES))
    to = at.to(gl.int64)[:, None] * (2 * D) + column[None, :]
    gl.store(p_rows + to, rows, mask=(at < count)[:, None])


@gluon.jit
def _weights(s, dp, marks, bit, base, delta, scale):
    """Return p and ds of a tile of keys."""
    p = gl.exp2(_seen(s, marks, bit) * (scale / LN2) - base[:, None])
    return p, p * (dp * scale - delta[:, None])


@gluon.jit
def _consume_apart(s, dp, dq, p_rows, buffers, signals, sizes, of_row, OWN: gl.constexpr):
    """Process the tiles of keys that only this warpgroup needs, every second one; return the next s and dp, and dq.

    It signals twice that it has read a buffer, since the other warpgroup does not wait for it.
    """
    q_tiles, do_tiles, k_buffers, _, marks, p_tiles, ds_tiles = buffers
    k_empty, v_empty = signals[1], signals[3]
    count, apart, scale = sizes
    bit, base, delta = of_row
    D: gl.constexpr = q_tiles.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dtype: gl.constexpr = q_tiles.dtype
    p_tile, ds_tile = p_tiles.index(OWN), ds_tiles.index(OWN)
    turns = gl.cdiv(count, KEYS)
    for j in range(apart):
        own = 2 * j + OWN
        following = gl.minimum(gl.where(j + 1 < apart, own + 2, 2 * apart), turns - 1)
        p, ds = _weights(s, dp, marks.index(own % BUFFERS).load(COLUMN), bit, base, delta, scale)
        p_tile.store(p.to(dtype))
        ds_tile.store(ds.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(v_empty.index(own % BUFFERS), count=2)
        zero = gl.zeros([KEYS, D], gl.float32, SUMS)
        mine = OWN + opaque_zero(j)
        dv_token = warpgroup_mma(p_tile.permute((1, 0)), do_tiles.index(mine), zero, use_acc=False, is_async=True)
        dq_token = warpgroup_mma(ds_tile, k_buffers.index(own % BUFFERS), dq, is_async=True)
        dv, dq = warpgroup_mma_wait(0, deps=[dv_token, dq_token])
        barrier()  # all warps have read the buffer
        mbarrier.arrive(k_empty.index(own % BUFFERS), count=2)
        dv = dv.to(dtype)
        dk_token = warpgroup_mma(ds_tile.permute((1, 0)), q_tiles.index(mine), zero, use_acc=False, is_async=True)
        _await_keys(signals, following)
        fence_async_shared()
        s_token, dp_token = _products(buffers, following, OWN)
        _store_rows(p_rows, dv, own, count, D)
        dk = warpgroup_mma_wait(2, deps=[dk_token])
        _store_rows(p_rows, dk.to(dtype), own, count, 0)
        s, dp = warpgroup_mma_wait(0, deps=[s_token, dp_token])
        barrier()  # all warps have read p and ds
    return s, dp, dq


@gluon.jit
def _consume(tensors, buffers, signals, sizes, OWN: gl.constexpr, PART: gl.constexpr):
    """Compute p and ds of 64 rows, their dq, and rows: for own keys all, for others those of dv (OWN = 0) or dk (1)."""
    p_lse, p_delta, p_dq, p_rows = tensors
    q_tiles, do_tiles, k_buffers, _, marks, p_tiles, ds_tiles = buffers
    _, k_empty, _, v_empty, written, done = signals
    queries, count, apart, i_unit, group_size, first, queries_here, scale, dq_strides = sizes
    D: gl.constexpr = q_tiles.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dtype: gl.constexpr = q_tiles.dtype
    weights, x = (p_tiles if OWN == 0 else ds_tiles), (do_tiles if OWN == 0 else q_tiles)
    o_row = OWN * ROWS + gl.arange(0, ROWS, ROW)
    place = o_row // PART
    inside = (place < queries_here) & (o_row % PART < group_size)
    bit = gl.where(inside, 1 << place, 0)
    t, head = (first + place).to(gl.int64), (i_unit * group_size + o_row % PART).to(gl.int64)
    lse = gl.load(p_lse + head * queries + t, mask=inside, other=0.0)
    base = gl.where(lse == -float("inf"), 0.0, lse / LN2)
    delta = gl.load(p_delta + head * queries + t, mask=inside, other=0.0) * scale
    dq = gl.zeros([ROWS, D], gl.float32, SUMS)
    before = 2 * apart
    turns = gl.cdiv(count, KEYS) - before
    if count > 0:
        _await_keys(signals, gl.where(apart > 0, OWN, 0))
        fence_async_shared()
        s_token, dp_token = _products(buffers, gl.where(apart > 0, OWN, 0), OWN)
        s, dp = warpgroup_mma_wait(0, deps=[s_token, dp_token])
        s, dp, dq = _consume_apart(s, dp, dq, p_rows, buffers, signals, (count, apart, scale), (bit, base, delta), OWN)
        if turns > 0:
            for i in range(turns + 1):  # the last turn, with ds of 0, makes the rows of the one before
                buffer = (before + gl.minimum(i, turns - 1)) % BUFFERS
                slot = i & 1
                p, ds = _weights(s, dp, marks.index(buffer).load(COLUMN), bit, base, delta, scale)
                if i == turns:
                    ds = gl.zeros_like(ds)
                mbarrier.wait(done.index(slot), (i // 2 & 1) ^ 1)  # rows were made of what is there
                p_tiles.index(2 * slot + OWN).store(p.to(dtype))
                ds_tiles.index(2 * slot + OWN).store(ds.to(dtype))
                following = before + gl.minimum(i + 1, turns - 1)
                _await_keys(signals, following)
                fence_async_shared()
                barrier()
                if i < turns:
                    mbarrier.arrive(v_empty.index(buffer), count=1)
                mbarrier.arrive(written.index(slot), count=1)
                if i > 0:
                    mbarrier.wait(written.index(1 - slot), (i - 1) // 2 & 1)
                rows = _rows_of_keys(weights, x, 1 - slot, i)  # the turn before; in the first turn they are not used
                dq_token = warpgroup_mma(ds_tiles.index(2 * slot + OWN), k_buffers.index(buffer), dq, is_async=True)
                s_token, dp_token = _products(buffers, following, OWN)
                dq, rows = warpgroup_mma_wait(2, deps=[dq_token, rows])
                barrier()  # all warps have read the buffers
                if i < turns:
                    mbarrier.arrive(k_empty.index(buffer), count=1)
                if i > 0:
                    mbarrier.arrive(done.index(1 - slot), count=1)
                    _store_rows(p_rows, rows.to(dtype), before + i - 1, count, (1 - OWN) * D)
                s, dp = warpgroup_mma_wait(0, deps=[s_token, dp_token])
    p_to = gl.convert_layout(t * dq_strides.n + head * dq_strides.h, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    inside = gl.convert_layout(inside, gl.SliceLayout(1, SUMS))
    gl.store(p_dq + p_to[:, None] + column[None, :], dq.to(dtype), mask=inside[:, None])


@kernel_launcher
@gluon.jit(
    do_not_specialize=[
        "queries",
        "tiles",
        "units",
        "own_units",
        "select_heads",
        "kv_heads",
        "slots",
        "group_size",
        "rows",
        "first_tile",
        "first_unit",
    ]
)
def _token_grouped_rows_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_dq,  # (T, Hq, D)
    p_rows,  # (kv heads of this launch, rows, 2 D): dk, then dv
    p_lse,  # (Hq, T) fp32 contiguous
    p_delta,  # the same
    lists,  # `ListTables`
    p_apart,  # (tiles, Hs) int32: turns that each warpgroup has to itself
    p_begin,  # (tiles of this launch, units of a kv head) int32: the first row of each
    rows,  # rows per kv head
    first_tile,  # first tile of this launch
    first_unit,
    queries,
    units,  # groups of q heads that share a kv head and a list
    own_units,  # units per kv head
    select_heads,
    kv_heads,
    slots,
    group_size,
    scale,
    q_strides,  # `PackedStrides`
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    D: gl.constexpr,
    PART: gl.constexpr,
):
    i_cell, i_place = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)  # long lists first
    i_tile, i_unit = first_tile + i_cell, first_unit + i_place
    first, queries_here = gl.load(lists.p_tiles + 2 * i_tile), gl.load(lists.p_tiles + 2 * i_tile + 1)
    last = gl.load(lists.p_position + first + queries_here - 1)
    i_kv = (i_unit * kv_heads // units).to(gl.int64)
    i_list = i_tile.to(gl.int64) * select_heads + i_unit * select_heads // units
    first_key = gl.load(lists.p_first_key + first).to(gl.int64)
    p_k += first_key * k_strides.n + i_kv * k_strides.h
    p_v += first_key * v_strides.n + i_kv * v_strides.h
    begin = gl.load(p_begin + i_cell * own_units + i_place % own_units)
    p_rows += ((i_place // own_units).to(gl.int64) * rows + begin) * (2 * D)
    count, apart = gl.load(lists.p_counts + i_list), gl.load(p_apart + i_list)
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D], TILE)
    do_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D], TILE)
    k_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, D], TILE)
    v_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, D], TILE)
    p_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, KEYS], TILE)
    ds_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, KEYS], TILE)
    for i in gl.static_range(4):  # the first turn multiplies what no turn has written
        p_tiles.index(i).store(gl.zeros([ROWS, KEYS], dtype, SCORES))
        ds_tiles.index(i).store(gl.zeros([ROWS, KEYS], dtype, SCORES))
    marks = gl.allocate_shared_memory(gl.int32, [BUFFERS, KEYS], MARKS)
    k_full, k_empty = barriers(BUFFERS, 128), barriers(BUFFERS, 2)
    v_full, v_empty = barriers(BUFFERS, 128), barriers(BUFFERS, 2)
    written, done = barriers(2, 2), barriers(2, 2)
    layout: gl.constexpr = _copy_layout(D)
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    for i in gl.static_range(2):
        o_row = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        inside = (o_row // PART < queries_here) & (o_row % PART < group_size)
        t, head = (first + o_row // PART).to(gl.int64), (i_unit * group_size + o_row % PART).to(gl.int64)
        p_from = p_q + (t * q_strides.n + head * q_strides.h)[:, None] + column[None, :]
        q_tiles.index(i).store(gl.load(p_from, mask=inside[:, None], other=0.0))
        p_from = p_do + (t * do_strides.n + head * do_strides.h)[:, None] + column[None, :]
        do_tiles.index(i).store(gl.load(p_from, mask=inside[:, None], other=0.0))
    fence_async_shared()
    tensors = p_lse, p_delta, p_dq, p_rows
    sizes = queries, count, apart, i_unit, group_size, first, queries_here, scale, dq_strides
    p_list, p_marks = lists.p_lists + i_list * slots, lists.p_marks + i_list * slots
    buffers = q_tiles, do_tiles, k_buffers, v_buffers, marks, p_tiles, ds_tiles
    signals = k_full, k_empty, v_full, v_empty, written, done
    gl.warp_specialize(
        [
            (_consume, (tensors, buffers, signals, sizes, 0, PART)),
            (_consume, (tensors, buffers, signals, sizes, 1, PART)),
            (_produce, (p_k, p_v, p_list, p_marks, buffers, signals, count, last, k_strides, v_strides)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
