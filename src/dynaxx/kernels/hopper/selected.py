# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Selected attention by query for Hopper, in Gluon: warp-specialised, one producer warp and a few consumers.

A consumer warpgroup owns the 64 rows of 64 / group neighbouring positions. The producer feeds the union of the blocks
of all consumers' positions by TMA, each once; a consumer passes over those that none of its own positions selected.

T queries, M keys, Hq / Hk / Hs query, kv and selection heads; D head_dim of q, k and v.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.hopper.forward import LOG2E
from dynaxx.kernels.hopper.forward_consume import LN2, ROWS
from dynaxx.kernels.hopper.launch import dense_rows
from dynaxx.kernels.hopper.selected_tiles import descriptor, feed_block, feed_blocks, registers, stages
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.native import Mixture
from dynaxx.kernels.triton.native_index import Unions
from dynaxx.layout.native import NativeSpans


@gluon.jit
def _produce(
    blocks, CONSUMERS: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    MIXED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    (
        q_desc, k_desc, v_desc, cmp_desc, swa_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty,
        p_starts, count, window_begin, window_count, first_t, i_head, i_hk,
    ) = blocks  # fmt: skip
    mbarrier.expect(q_full.index(0), CONSUMERS * q_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [first_t + u * POSITIONS, i_head * GROUP, 0]
        tma.async_copy_global_to_shared(q_desc, at, q_full.index(0), q_buffers.index(u))
    if WINDOWED:
        KV_BLOCK: gl.constexpr = k_desc.block_type.shape[1]
        for i_block in range(window_count):
            start = window_begin + i_block * KV_BLOCK
            feed_block(k_desc, v_desc, k_buffers, v_buffers, full, empty, i_block, [i_hk, start, 0], STAGES)
    feed_blocks(k_desc, v_desc, k_buffers, v_buffers, full, empty, p_starts, count, window_count, i_hk, STAGES)
    if MIXED:
        BRANCHES: gl.constexpr = 1 if WINDOWED else 2
        for u in gl.static_range(CONSUMERS):
            i_block = window_count + count + u
            stage = i_block % STAGES
            mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BRANCHES * q_desc.block_type.nbytes)
            at = [first_t + u * POSITIONS, i_head * GROUP, 0]
            tma.async_copy_global_to_shared(cmp_desc, at, full.index(stage), _row_tile(k_buffers, q_desc, stage))
            if not WINDOWED:
                tma.async_copy_global_to_shared(swa_desc, at, full.index(stage), _row_tile(v_buffers, q_desc, stage))


@gluon.jit
def _row_tile(buffers, q_desc, stage):
    """A block's buffer as that of a consumer's rows."""
    tile: gl.constexpr = q_desc.block_type.shape
    PER_BLOCK: gl.constexpr = buffers.shape[2] // ROWS
    tiles = buffers._reinterpret(q_desc.dtype, [buffers.shape[0] * PER_BLOCK, tile[0], tile[1], tile[2]], q_desc.layout)
    return tiles.index(stage * PER_BLOCK)


@gluon.jit
def _scores(q, k, layout: gl.constexpr):
    """[ROWS, KV_BLOCK] fp32."""
    KV_BLOCK: gl.constexpr = k.shape[0]
    zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, layout)
    token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[token])


@gluon.jit
def _add_block(sums, scores, v, selected, scale_log2, p_layout: gl.constexpr):
    """What a row has so far, its greatest score, its sums of weights and of values, and a block more.

    Rows that are not `selected`, where it is not None, have nothing of it.
    """
    row_max, row_sum, acc = sums
    best = gl.max(scores, 1) * scale_log2
    if selected is not None:
        best = gl.where(selected, best, -float("inf"))
    new_max = gl.maximum(row_max, best)
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)
    if selected is not None:
        shift = gl.where(selected, shift, float("inf"))
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    row_sum = row_sum * rescale + gl.sum(weights, 1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(weights.to(v.dtype), p_layout)
    token = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    return new_max, row_sum, acc


@gluon.jit
def _result(sums):
    """Out and lse."""
    row_max, row_sum, acc = sums
    hidden = row_sum == 0
    row_sum = gl.where(hidden, 1.0, row_sum)
    lse = gl.where(hidden, -float("inf"), (row_max + gl.log2(row_sum)) * LN2)
    return acc / gl.convert_layout(row_sum, gl.SliceLayout(1, acc.type.layout))[:, None], lse


@gluon.jit
def _consume(
    rows, CONSUMER: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, ALONE: gl.constexpr, MIXED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    (
        out_desc, swa_desc, mixed_desc, q_buffers, w_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse,
        p_swa_lse, p_last_key, p_first_block, p_block_start, p_starts, p_members, p_gates, count, window,
        window_begin, window_count, first_t, i_head, queries, heads, scale_log2,
    ) = rows  # fmt: skip
    D: gl.constexpr = out_desc.block_type.shape[2]
    EVERY: gl.constexpr = (1 << POSITIONS) - 1
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, KV_BLOCK, gl.SliceLayout(0, s_layout))
    first_t += CONSUMER * POSITIONS
    position = o_row // GROUP
    t = first_t + position
    h = i_head * GROUP + o_row % GROUP
    last_key = gl.load(p_last_key + t, mask=t < queries, other=-1)
    nearest = gl.min(last_key, 0)
    none = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    zero = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    nothing = gl.zeros([ROWS, D], gl.float32, acc_layout)
    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    mbarrier.wait(q_full.index(0), 0)
    if WINDOWED:
        first_key = gl.maximum(_sequence_start(p_first_block, p_block_start, t, t < queries), last_key - window + 1)
        first_key = gl.where(t < queries, first_key, 0x7FFFFFFF)
        seen_from, all_from, seen_to = gl.min(first_key, 0), gl.max(first_key, 0), gl.max(last_key, 0)
        sums = none, zero, nothing
        for i_block in range(window_count):
            start = window_begin + i_block * KV_BLOCK
            stage = i_block % STAGES
            mbarrier.wait(full.index(stage), (i_block // STAGES) & 1)
            if (start <= seen_to) & (start + KV_BLOCK > seen_from):
                scores = _scores(q, k_buffers.index(stage).reshape([KV_BLOCK, D]), s_layout)
                if (start < all_from) | (start + KV_BLOCK - 1 > nearest):
                    seen = (columns[None, :] >= (first_key - start)[:, None]) & (
                        columns[None, :] <= (last_key - start)[:, None]
                    )
                    scores = gl.where(seen, scores, -float("inf"))
                v = v_buffers.index(stage).reshape([KV_BLOCK, D])
                sums = _add_block(sums, scores, v, None, scale_log2, p_layout)
            mbarrier.arrive(empty.index(stage), count=1)
        swa, swa_lse = _result(sums)
        w_buffers.index(CONSUMER).reshape([ROWS, D]).store(swa.to(out_desc.dtype))
        if ALONE:
            gl.store(p_swa_lse + h.to(gl.int64) * queries + t, swa_lse, mask=t < queries)
            fence_async_shared()
            at = [first_t, i_head * GROUP, 0]
            tma.async_copy_shared_to_global(swa_desc, at, w_buffers.index(CONSUMER))
    sums = none, zero, nothing
    next_members, next_start = gl.load(p_members), gl.load(p_starts)
    for i_slot in range(count):
        members, start = (next_members >> (CONSUMER * POSITIONS)) & EVERY, next_start
        ahead = gl.minimum(i_slot + 1, count - 1)
        next_members, next_start = gl.load(p_members + ahead), gl.load(p_starts + ahead)
        i_block = window_count + i_slot
        stage = i_block % STAGES
        mbarrier.wait(full.index(stage), (i_block // STAGES) & 1)
        if members != 0:
            scores = _scores(q, k_buffers.index(stage).reshape([KV_BLOCK, D]), s_layout)
            if start + KV_BLOCK - 1 > nearest:
                scores = gl.where(columns[None, :] <= (last_key - start)[:, None], scores, -float("inf"))
            v = v_buffers.index(stage).reshape([KV_BLOCK, D])
            sums = _add_block(sums, scores, v, ((members >> position) & 1) != 0, scale_log2, p_layout)
        mbarrier.arrive(empty.index(stage), count=1)
    acc, lse = _result(sums)
    gl.store(p_lse + h.to(gl.int64) * queries + t, lse, mask=t < queries)
    at = [first_t, i_head * GROUP, 0]
    if ALONE:
        q.store(acc.to(out_desc.dtype))  # q is read no more: its buffer carries the result out
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, at, q_buffers.index(CONSUMER))
    if MIXED:
        p_gates += (t.to(gl.int64) * (heads * GROUP) + h) * 3
        i_block = window_count + count + CONSUMER
        stage = i_block % STAGES
        acc *= _gate(p_gates + 1, t < queries, acc_layout)
        if WINDOWED:
            swa = w_buffers.index(CONSUMER).reshape([ROWS, D]).load(acc_layout)
            acc += swa.to(gl.float32) * _gate(p_gates + 2, t < queries, acc_layout)
        mbarrier.wait(full.index(stage), (i_block // STAGES) & 1)
        cmp = _row_tile(k_buffers, out_desc, stage)
        acc += cmp.reshape([ROWS, D]).load(acc_layout).to(gl.float32) * _gate(p_gates, t < queries, acc_layout)
        if not WINDOWED:
            swa = _row_tile(v_buffers, out_desc, stage).reshape([ROWS, D]).load(acc_layout)
            acc += swa.to(gl.float32) * _gate(p_gates + 2, t < queries, acc_layout)
        cmp.reshape([ROWS, D]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(mixed_desc, at, cmp)
    tma.store_wait(0)


@gluon.jit
def _gate(p_gates, inside, layout: gl.constexpr):
    """[ROWS, 1] fp32."""
    gate = gl.load(p_gates, mask=inside, other=0.0).to(gl.float32)
    return gl.convert_layout(gate, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _sequence_start(p_first_block, p_block_start, t, inside):
    """First key of a query's sequence."""
    return gl.load(p_block_start + gl.load(p_first_block + t, mask=inside, other=0))


@gluon.jit
def _window_of(p_last_key, p_first_block, p_block_start, first_t, positions, queries, window, KV_BLOCK: gl.constexpr):
    """First key of a tile's window, and how many blocks it takes from there."""
    start = _sequence_start(p_first_block, p_block_start, first_t, True)
    begin = gl.maximum(start, gl.load(p_last_key + first_t) - window + 1)
    last = gl.load(p_last_key + gl.minimum(first_t + positions, queries) - 1)
    return begin, gl.maximum(last - begin + KV_BLOCK, 0) // KV_BLOCK


@light_launch
@gluon.jit(do_not_specialize=["queries", "heads", "heads_per_kv", "window"])
def _selected_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc,
    cmp_desc, swa_desc,  # as out: the other branches, read with MIXED; with WINDOWED swa is written if ALONE
    mixed_desc,  # the sum of all three, each times its gate
    p_gates,  # (T, Hq, 3) contiguous: of the compressed, this, and the window branch
    p_swa_lse,  # of the window branch, as swa
    p_lse, p_last_key, p_first_block, p_block_start, p_starts, p_members, p_counts,
    p_taken,  # (1,) int32, 0 where nothing is to be done; not read without CHOSEN
    queries, heads, heads_per_kv, window, scale_log2,
    SLOTS: gl.constexpr,  # of a tile's union
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CHOSEN: gl.constexpr,
    ALONE: gl.constexpr,  # store out, and what else is made here, by itself
    MIXED: gl.constexpr,  # store the sum of all branches
    WINDOWED: gl.constexpr,  # attend to the window, too
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    run = True
    if CHOSEN:
        run = gl.load(p_taken) != 0
    if run:
        POSITIONS: gl.constexpr = ROWS // GROUP  # of one consumer
        i_program = gl.program_id(0)
        i_head = i_program % heads
        count = gl.load(p_counts + i_program)
        p_starts += i_program.to(gl.int64) * SLOTS
        p_members += i_program.to(gl.int64) * SLOTS
        first_t = i_program // heads * (CONSUMERS * POSITIONS)
        window_begin, window_count = 0, 0
        if WINDOWED:
            window_begin, window_count = _window_of(
                p_last_key, p_first_block, p_block_start, first_t, CONSUMERS * POSITIONS, queries, window, KV_BLOCK
            )
        dtype: gl.constexpr = q_desc.dtype
        D: gl.constexpr = q_desc.block_type.shape[2]
        q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
        w_buffers = q_buffers
        if WINDOWED:
            w_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
        k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], k_desc.layout)
        v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, KV_BLOCK, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full.index(0), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        rows = (
            out_desc, swa_desc, mixed_desc, q_buffers, w_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse,
            p_swa_lse, p_last_key, p_first_block, p_block_start, p_starts, p_members, p_gates, count, window,
            window_begin, window_count, first_t, i_head, queries, heads, scale_log2,
        )  # fmt: skip
        blocks = (
            q_desc, k_desc, v_desc, cmp_desc, swa_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty,
            p_starts, count, window_begin, window_count, first_t, i_head, i_head // heads_per_kv,
        )  # fmt: skip
        if CONSUMERS == 3:
            gl.warp_specialize([
                (_consume, (rows, 0, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED, WINDOWED)),
                (_consume, (rows, 1, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED, WINDOWED)),
                (_consume, (rows, 2, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED, WINDOWED)),
                (_produce, (blocks, CONSUMERS, POSITIONS, GROUP, STAGES, MIXED, WINDOWED)),
            ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (_consume, (rows, 0, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED, WINDOWED)),
                (_consume, (rows, 1, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED, WINDOWED)),
                (_produce, (blocks, CONSUMERS, POSITIONS, GROUP, STAGES, MIXED, WINDOWED)),
            ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NativeSpans, consumers: int, scale: float,
    taken: Tensor | None, mixture: Mixture | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (T, Hq, D) and lse (Hq, T) fp32; scale > 0, dense rows, unions of `consumers` times 64 rows.

    Nothing is written where `taken` (1,) int32, on the device, is 0.
    """
    queries, q_heads, dim = q.shape
    tiles, heads, slots = union.starts.shape
    group_size, size = q_heads // heads, spans.sizes.slc_block
    out = q.new_empty(q.shape) if mixture is None or mixture.alone else mixture.out
    lse = q.new_empty(q_heads, queries, dtype=torch.float32)
    row_tiles = lambda x: descriptor(x, (64 // group_size, group_size, dim))
    windowed = mixture is not None and mixture.swa_lse is not None
    others, swa_lse = (out, out, out, lse), lse
    if mixture is not None:
        cmp, swa = (dense_rows(x[None])[0] for x in (mixture.cmp, mixture.swa))
        others = cmp, swa, mixture.out, mixture.gates.contiguous()
        swa_lse = lse if mixture.swa_lse is None else mixture.swa_lse
    _selected_hopper_fwd_kernel[(tiles * heads,)](
        row_tiles(q),
        descriptor(k.transpose(0, 1), (1, size, dim)),
        descriptor(v.transpose(0, 1), (1, size, dim)),
        row_tiles(out),
        *map(row_tiles, others[:3]),
        others[3],
        swa_lse,
        lse,
        spans.last_key,
        spans.first_block,
        spans.block_start,
        union.starts,
        union.members,
        union.counts,
        union.counts if taken is None else taken,
        queries=queries,
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        window=spans.sizes.window,
        scale_log2=scale * LOG2E,
        SLOTS=slots,
        CONSUMERS=consumers,
        GROUP=group_size,
        KV_BLOCK=size,
        STAGES=stages(consumers, 2 if windowed else 1, dim, size),
        CHOSEN=taken is not None,
        ALONE=mixture is None or mixture.alone,
        MIXED=mixture is not None,
        WINDOWED=windowed,
        **registers(consumers),
    )
    return out, lse
