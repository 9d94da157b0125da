# SPDX-License-Identifier: Apache-2.0
"""Forward over chosen tokens of grouped-query heads on Hopper: warps that gather, and two warpgroups that compute.

A program is a tile of neighbouring queries times the q heads of a kv head, 128 rows, and the union of what the queries
chose (`gpu/unions.py`), 64 keys at a time:

    gathering warps      rows of k and v, by cp.async, into buffers of 64 keys
    warpgroup 0 and 1    s = q k of 64 rows -> weights, by a bit per query and key -> out += weights v

The more queries share a tile, the fewer rows are read per query, and the more pairs are computed in vain. Each list
begins with keys that only one of the warpgroups needs (`grouped_order.py`): 64 for warpgroup 0, 64 for warpgroup 1, and
so on.
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
from dynaxx.kernels.primitives.hopper.signals import barriers, hold_before_wait
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.gather import TILE, listed_tokens

ROWS, KEYS = gl.constexpr(64), gl.constexpr(64)  # rows of a warpgroup, keys of a buffer
BUFFERS = gl.constexpr(6)
WARPS, MAX_REGISTERS = 4, 168
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(56)
LN2 = gl.constexpr(0.6931471805599453)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROW, COLUMN = gl.constexpr(gl.SliceLayout(1, SCORES)), gl.constexpr(gl.SliceLayout(0, SCORES))
MARKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _copy_layout(columns):
    """Return a layout in which a thread copies 16 bytes at a time."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _produce(p_k, p_v, p_list, p_marks, buffers, signals, count, last, k_strides, v_strides):
    """Gather all keys and values, and their marks; those of missing tokens become 0."""
    _, k_buffers, v_buffers, marks = buffers
    full, empty = signals
    layout: gl.constexpr = _copy_layout(k_buffers.shape[2])
    column = gl.arange(0, k_buffers.shape[2], gl.SliceLayout(0, layout))
    key = listed_tokens(p_list, 0, count, KEYS, gl.SliceLayout(1, layout))
    for i in range(2 * gl.cdiv(count, 2 * KEYS)):
        buffer = i % BUFFERS
        there = (key >= 0) & (key <= last)
        row = gl.where(there, key, 0).to(gl.int64)
        key = listed_tokens(p_list, i + 1, count, KEYS, gl.SliceLayout(1, layout))
        mbarrier.wait(empty.index(buffer), (i // BUFFERS & 1) ^ 1)
        p_rows = p_k + (row * k_strides.n)[:, None] + column[None, :]
        copy_to_shared(k_buffers.index(buffer), p_rows, mask=there[:, None])
        p_rows = p_v + (row * v_strides.n)[:, None] + column[None, :]
        copy_to_shared(v_buffers.index(buffer), p_rows, mask=there[:, None])
        o_mark = i * KEYS + gl.arange(0, KEYS, ONE_EACH)
        copy_to_shared(marks.index(buffer), p_marks + o_mark, mask=o_mark < count)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _scores(q, k_buffers, i):
    """Start the scores of a buffer of keys."""
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    return warpgroup_mma(q, k_buffers.index(i % BUFFERS).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _seen(scores, marks, bit):
    """Return scores [ROWS, KEYS], and -inf where the mark of a key lacks the bit of a row.

    LLVM would pack the conditions of `gl.where` into bits of words, and unpack them again.
    """
    scores, marks = gl.broadcast(scores, marks[None, :])
    scores, bit = gl.broadcast(scores, bit[:, None])
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %seen;
        .reg .b32 %common;
        and.b32 %common, $2, $3;
        setp.ne.u32 %seen, %common, 0;
        selp.f32 $0, $1, 0fFF800000, %seen;
        }""",
        "=f,f,r,r", [scores, marks, bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _attend_apart(q, row_max, row_sum, acc, buffers, signals, apart, bit, scale_log2, OWN: gl.constexpr):
    """Attend to the buffers of keys that only this warpgroup needs, every second one; signal the others as read."""
    _, k_buffers, v_buffers, marks = buffers
    full, empty = signals
    SUMS: gl.constexpr = acc.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = k_buffers.dtype
    weights = gl.zeros([ROWS, KEYS], dtype, WEIGHTS)
    for j in range(apart):
        own, other = 2 * j + OWN, 2 * j + 1 - OWN
        before = gl.where(j > 0, own - 2, own)  # the first weights are 0
        mbarrier.wait(full.index(own % BUFFERS), own // BUFFERS & 1)
        fence_async_shared()
        token = _scores(q, k_buffers, own)
        acc_token = warpgroup_mma(weights, v_buffers.index(before % BUFFERS), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[token])
        scores = _seen(scores, marks.index(own % BUFFERS).load(COLUMN), bit)
        new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
        shift = gl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - shift)
        new_weights = gl.exp2(scores * scale_log2 - shift[:, None])
        row_sum = hold_before_wait(row_sum * rescale + gl.sum(new_weights, 1))
        row_max = new_max
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.wait(full.index(other % BUFFERS), other // BUFFERS & 1)
        barrier()  # all warps have read their buffer, and seen that the other one was filled
        mbarrier.arrive(empty.index(other % BUFFERS), count=1)
        if j > 0:
            mbarrier.arrive(empty.index(before % BUFFERS), count=1)
        weights = gl.convert_layout(new_weights.to(dtype), WEIGHTS)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
    if apart > 0:
        last = 2 * apart - 2 + OWN
        acc = warpgroup_mma(weights, v_buffers.index(last % BUFFERS), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(last % BUFFERS), count=1)
    return row_max, row_sum, acc


@gluon.jit
def _consume(tensors, buffers, signals, sizes, OWN: gl.constexpr, PART: gl.constexpr):
    """Attend with 64 rows, two buffers of keys at a time; the last of an odd number is filled up with no keys."""
    p_out, p_lse = tensors
    q_tiles, k_buffers, v_buffers, marks = buffers
    full, empty = signals
    queries, count, apart, i_unit, group_size, first, queries_here, scale_log2, out_strides = sizes
    D: gl.constexpr = q_tiles.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = q_tiles.dtype
    q = q_tiles.index(OWN)
    o_row = OWN * ROWS + gl.arange(0, ROWS, ROW)
    place = o_row // PART
    bit = gl.where((place < queries_here) & (o_row % PART < group_size), 1 << place, 0)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    row_max, row_sum, acc = _attend_apart(q, row_max, row_sum, acc, buffers, signals, apart, bit, scale_log2, OWN)
    left = gl.zeros([ROWS, KEYS], dtype, WEIGHTS)
    right = left
    base = 2 * apart
    turns = gl.cdiv(count - base * KEYS, 2 * KEYS)
    for i in range(turns):
        now = base + 2 * i
        before = gl.where(i > 0, now - 2, now)  # the first weights are 0
        mbarrier.wait(full.index(now % BUFFERS), now // BUFFERS & 1)
        mbarrier.wait(full.index((now + 1) % BUFFERS), (now + 1) // BUFFERS & 1)
        fence_async_shared()
        left_token, right_token = _scores(q, k_buffers, now), _scores(q, k_buffers, now + 1)
        acc_token = warpgroup_mma(left, v_buffers.index(before % BUFFERS), acc, is_async=True)
        acc_token = warpgroup_mma(right, v_buffers.index((before + 1) % BUFFERS), acc_token, is_async=True)
        left_scores, right_scores = warpgroup_mma_wait(2, deps=[left_token, right_token])
        left_marks = marks.index(now % BUFFERS).load(COLUMN)
        right_marks = marks.index((now + 1) % BUFFERS).load(COLUMN)
        left_scores, right_scores = _seen(left_scores, left_marks, bit), _seen(right_scores, right_marks, bit)
        new_max = gl.maximum(row_max, gl.max(gl.maximum(left_scores, right_scores), 1) * scale_log2)
        shift = gl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - shift)
        left_weights = gl.exp2(left_scores * scale_log2 - shift[:, None])
        right_weights = gl.exp2(right_scores * scale_log2 - shift[:, None])
        row_sum = hold_before_wait(row_sum * rescale + gl.sum(left_weights + right_weights, 1))
        row_max = new_max
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        barrier()  # all warps have read the buffers
        if i > 0:
            mbarrier.arrive(empty.index(before % BUFFERS), count=1)
            mbarrier.arrive(empty.index((before + 1) % BUFFERS), count=1)
        left = gl.convert_layout(left_weights.to(dtype), WEIGHTS)
        right = gl.convert_layout(right_weights.to(dtype), WEIGHTS)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
    if turns > 0:
        acc = warpgroup_mma(left, v_buffers.index((base + 2 * turns - 2) % BUFFERS), acc, is_async=True)
        acc = warpgroup_mma(right, v_buffers.index((base + 2 * turns - 1) % BUFFERS), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    empty_row = row_sum == 0
    total = gl.where(empty_row, 1.0, row_sum)
    t, head = (first + place).to(gl.int64), (i_unit * group_size + o_row % PART).to(gl.int64)
    inside = (place < queries_here) & (o_row % PART < group_size)
    lse = gl.where(empty_row, -float("inf"), row_max * LN2 + gl.log(total))
    gl.store(p_lse + head * queries + t, lse, mask=inside)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    p_rows = gl.convert_layout(t * out_strides.n + head * out_strides.h, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    inside = gl.convert_layout(inside, gl.SliceLayout(1, SUMS))
    gl.store(p_out + p_rows[:, None] + column[None, :], acc.to(dtype), mask=inside[:, None])


@kernel_launcher
@gluon.jit(do_not_specialize=["queries", "tiles", "slots", "units", "select_heads", "kv_heads", "group_size"])
def _token_grouped_kernel(
    p_q,
    p_k,
    p_v,
    p_out,  # (T, Hq, D)
    p_lse,  # (Hq, T) fp32 contiguous
    lists,  # `ListTables`
    p_apart,  # (tiles, Hs) int32: turns that each warpgroup has to itself
    queries,
    tiles,
    units,  # groups of q heads that share a kv head and a list
    select_heads,
    kv_heads,
    slots,
    group_size,
    scale_log2,
    q_strides,  # `PackedStrides`
    k_strides,
    v_strides,
    out_strides,
    D: gl.constexpr,
    PART: gl.constexpr,
):
    i_tile, i_unit = tiles - 1 - gl.program_id(0), gl.program_id(1)  # long lists first
    first, queries_here = gl.load(lists.p_tiles + 2 * i_tile), gl.load(lists.p_tiles + 2 * i_tile + 1)
    last = gl.load(lists.p_position + first + queries_here - 1)
    i_kv = (i_unit * kv_heads // units).to(gl.int64)
    i_list = i_tile.to(gl.int64) * select_heads + i_unit * select_heads // units
    first_key = gl.load(lists.p_first_key + first).to(gl.int64)
    p_k += first_key * k_strides.n + i_kv * k_strides.h
    p_v += first_key * v_strides.n + i_kv * v_strides.h
    count, apart = gl.load(lists.p_counts + i_list), gl.load(p_apart + i_list)
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D], TILE)
    k_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, D], TILE)
    v_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, KEYS, D], TILE)
    marks = gl.allocate_shared_memory(gl.int32, [BUFFERS, KEYS], MARKS)
    full, empty = barriers(BUFFERS, 128), barriers(BUFFERS, 2)
    layout: gl.constexpr = _copy_layout(D)
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    for i in gl.static_range(2):
        o_row = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        inside = (o_row // PART < queries_here) & (o_row % PART < group_size)
        t, head = (first + o_row // PART).to(gl.int64), (i_unit * group_size + o_row % PART).to(gl.int64)
        p_rows = p_q + (t * q_strides.n + head * q_strides.h)[:, None] + column[None, :]
        q_tiles.index(i).store(gl.load(p_rows, mask=inside[:, None], other=0.0))
    fence_async_shared()
    tensors = p_out, p_lse
    sizes = queries, count, apart, i_unit, group_size, first, queries_here, scale_log2, out_strides
    p_list = lists.p_lists + i_list * slots
    p_marks = lists.p_marks + i_list * slots
    buffers, signals = (q_tiles, k_buffers, v_buffers, marks), (full, empty)
    gl.warp_specialize(
        [
            (_consume, (tensors, buffers, signals, sizes, 0, PART)),
            (_consume, (tensors, buffers, signals, sizes, 1, PART)),
            (_produce, (p_k, p_v, p_list, p_marks, buffers, signals, count, last, k_strides, v_strides)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
