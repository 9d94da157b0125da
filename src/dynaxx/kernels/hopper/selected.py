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
from dynaxx.kernels.hopper.selected_tiles import descriptor, feed_blocks, registers, stages
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.native import Mixture
from dynaxx.kernels.triton.native_index import Unions
from dynaxx.layout.native import NativeSpans


@gluon.jit
def _produce(
    blocks, CONSUMERS: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    MIXED: gl.constexpr,
):  # fmt: skip
    (
        q_desc, k_desc, v_desc, cmp_desc, swa_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty,
        p_starts, count, first_t, i_head, i_hk,
    ) = blocks  # fmt: skip
    mbarrier.expect(q_full.index(0), CONSUMERS * q_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [first_t + u * POSITIONS, i_head * GROUP, 0]
        tma.async_copy_global_to_shared(q_desc, at, q_full.index(0), q_buffers.index(u))
    feed_blocks(k_desc, v_desc, k_buffers, v_buffers, full, empty, p_starts, count, i_hk, STAGES)
    if MIXED:
        for u in gl.static_range(CONSUMERS):
            i_block = count + u
            stage = i_block % STAGES
            mbarrier.wait(empty.index(stage), ((i_block // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes)
            at = [first_t + u * POSITIONS, i_head * GROUP, 0]
            tma.async_copy_global_to_shared(cmp_desc, at, full.index(stage), _row_tile(k_buffers, q_desc, stage))
            tma.async_copy_global_to_shared(swa_desc, at, full.index(stage), _row_tile(v_buffers, q_desc, stage))


@gluon.jit
def _row_tile(buffers, q_desc, stage):
    """A block's buffer as that of a consumer's rows."""
    tile: gl.constexpr = q_desc.block_type.shape
    PER_BLOCK: gl.constexpr = buffers.shape[2] // ROWS
    tiles = buffers._reinterpret(q_desc.dtype, [buffers.shape[0] * PER_BLOCK, tile[0], tile[1], tile[2]], q_desc.layout)
    return tiles.index(stage * PER_BLOCK)


@gluon.jit
def _consume(
    rows, CONSUMER: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, ALONE: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    (
        out_desc, mixed_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
        p_members, p_gates, count, first_t, i_head, queries, heads, scale_log2,
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
    last_key = gl.load(p_last_key + t, mask=t < queries, other=-1)
    nearest = gl.min(last_key, 0)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([ROWS, D], gl.float32, acc_layout)
    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    mbarrier.wait(q_full.index(0), 0)
    for i_block in range(count):
        members = (gl.load(p_members + i_block) >> (CONSUMER * POSITIONS)) & EVERY
        start = gl.load(p_starts + i_block)
        stage = i_block % STAGES
        mbarrier.wait(full.index(stage), (i_block // STAGES) & 1)
        if members != 0:
            k = k_buffers.index(stage).reshape([KV_BLOCK, D])
            zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, s_layout)
            s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[s_token])
            if (members != EVERY) | (start + KV_BLOCK - 1 > nearest):
                limit = gl.where(((members >> position) & 1) != 0, last_key, -1) - start
                scores = gl.where(columns[None, :] <= limit[:, None], scores, -float("inf"))
            new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
            shift = gl.where(new_max == -float("inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - shift)
            weights = gl.exp2(scores * scale_log2 - shift[:, None])
            row_max = new_max
            row_sum = row_sum * rescale + gl.sum(weights, 1)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
            p = gl.convert_layout(weights.to(out_desc.dtype), p_layout)
            v = v_buffers.index(stage).reshape([KV_BLOCK, D])
            acc_token = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(empty.index(stage), count=1)
    hidden = row_sum == 0
    row_sum = gl.where(hidden, 1.0, row_sum)
    lse = gl.where(hidden, -float("inf"), (row_max + gl.log2(row_sum)) * LN2)
    h = i_head * GROUP + o_row % GROUP
    gl.store(p_lse + h.to(gl.int64) * queries + t, lse, mask=t < queries)
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, acc_layout))[:, None]
    at = [first_t, i_head * GROUP, 0]
    if ALONE:
        q.store(acc.to(out_desc.dtype))  # q is read no more: its buffer carries the result out
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, at, q_buffers.index(CONSUMER))
    if MIXED:
        p_gates += (t.to(gl.int64) * (heads * GROUP) + h) * 3
        stage = (count + CONSUMER) % STAGES
        mbarrier.wait(full.index(stage), ((count + CONSUMER) // STAGES) & 1)
        acc *= _gate(p_gates + 1, t < queries, acc_layout)
        cmp = _row_tile(k_buffers, out_desc, stage)
        acc += cmp.reshape([ROWS, D]).load(acc_layout).to(gl.float32) * _gate(p_gates, t < queries, acc_layout)
        swa = _row_tile(v_buffers, out_desc, stage)
        acc += swa.reshape([ROWS, D]).load(acc_layout).to(gl.float32) * _gate(p_gates + 2, t < queries, acc_layout)
        cmp.reshape([ROWS, D]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(mixed_desc, at, cmp)
    tma.store_wait(0)


@gluon.jit
def _gate(p_gates, inside, layout: gl.constexpr):
    """[ROWS, 1] fp32."""
    gate = gl.load(p_gates, mask=inside, other=0.0).to(gl.float32)
    return gl.convert_layout(gate, gl.SliceLayout(1, layout))[:, None]


@light_launch
@gluon.jit(do_not_specialize=["queries", "heads", "heads_per_kv"])
def _selected_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc,
    cmp_desc, swa_desc,  # as out: the other branches; not read without MIXED
    mixed_desc,  # the sum of all three, each times its gate
    p_gates,  # (T, Hq, 3) contiguous: of the compressed, this, and the window branch
    p_lse, p_last_key, p_starts, p_members, p_counts,
    p_taken,  # (1,) int32, 0 where nothing is to be done; not read without CHOSEN
    queries, heads, heads_per_kv, scale_log2,
    SLOTS: gl.constexpr,  # of a tile's union
    CONSUMERS: gl.constexpr, GROUP: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CHOSEN: gl.constexpr,
    ALONE: gl.constexpr,  # store out
    MIXED: gl.constexpr,  # store the sum of all branches
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
        dtype: gl.constexpr = q_desc.dtype
        D: gl.constexpr = q_desc.block_type.shape[2]
        q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, POSITIONS, GROUP, D], q_desc.layout)
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
            out_desc, mixed_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty, p_lse, p_last_key, p_starts,
            p_members, p_gates, count, first_t, i_head, queries, heads, scale_log2,
        )  # fmt: skip
        blocks = (
            q_desc, k_desc, v_desc, cmp_desc, swa_desc, q_buffers, k_buffers, v_buffers, q_full, full, empty,
            p_starts, count, first_t, i_head, i_head // heads_per_kv,
        )  # fmt: skip
        if CONSUMERS == 3:
            gl.warp_specialize([
                (_consume, (rows, 0, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED)),
                (_consume, (rows, 1, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED)),
                (_consume, (rows, 2, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED)),
                (_produce, (blocks, CONSUMERS, POSITIONS, GROUP, STAGES, MIXED)),
            ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (_consume, (rows, 0, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED)),
                (_consume, (rows, 1, POSITIONS, GROUP, KV_BLOCK, STAGES, ALONE, MIXED)),
                (_produce, (blocks, CONSUMERS, POSITIONS, GROUP, STAGES, MIXED)),
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
    others = (out, out, out, lse)
    if mixture is not None:
        cmp, swa = (dense_rows(x[None])[0] for x in (mixture.cmp, mixture.swa))
        others = cmp, swa, mixture.out, mixture.gates.contiguous()
    _selected_hopper_fwd_kernel[(tiles * heads,)](
        row_tiles(q),
        descriptor(k.transpose(0, 1), (1, size, dim)),
        descriptor(v.transpose(0, 1), (1, size, dim)),
        row_tiles(out),
        *map(row_tiles, others[:3]),
        others[3],
        lse,
        spans.last_key,
        union.starts,
        union.members,
        union.counts,
        union.counts if taken is None else taken,
        queries=queries,
        heads=heads,
        heads_per_kv=heads // k.shape[1],
        scale_log2=scale * LOG2E,
        SLOTS=slots,
        CONSUMERS=consumers,
        GROUP=group_size,
        KV_BLOCK=size,
        STAGES=stages(consumers, 1, dim, size),
        CHOSEN=taken is not None,
        ALONE=mixture is None or mixture.alone,
        MIXED=mixture is not None,
        **registers(consumers),
    )
    return out, lse
