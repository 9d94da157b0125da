# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroup of the fused Hopper backward: 64 keys, dk and dv in registers, and half of the columns of dq.

For each tile of 64 queries, a consumer

    1. computes weights and ds of its 64 keys, and writes ds to shared memory;
    2. multiplies its weights with do, for dv;
    3. multiplies ds of all 128 keys of the previous tile with its columns of k, for dq;
    4. multiplies its own ds with q, for dk; meanwhile the tile of dq goes to shared memory, and TMA adds it to the
       sums.

One consumer may therefore be one tile ahead of the other. Sums are stored in the order in which threads hold a tile:
each thread writes 16 bytes next to its neighbour's, and a tile is contiguous.

If the end of the keys cuts a block, all of its tiles are masked. Keys past the end have score 0. If all real scores are
much lower, the weights of these keys overflow, and inf times a key of zeros would make dq NaN.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.attention.hopper.backward_columns import read_column, store_columns
from dynaxx.kernels.attention.hopper.backward_consume import keep
from dynaxx.kernels.attention.hopper.backward_produce import FIELDS, NOWHERE, RING
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import reinterpret, tma_add
from dynaxx.kernels.primitives.hopper.column_parts import (
    part_count,
    part_first,
    part_width,
    start_scores,
    start_sums,
    wait_for,
    wait_for_both,
    zero_parts,
)
from dynaxx.kernels.primitives.hopper.signals import opaque_zero, receive_number
from dynaxx.kernels.primitives.hopper.softcap import capped, sloped


class FusedBuffers(NamedTuple):
    """Values that the two consumers share, and the place where they add dq."""

    sums_desc: Any
    ds_buffers: Any
    dq_buffers: Any  # a tile of dq on its way to the sums, by what one instruction adds
    kv_read: Any
    ds_full: Any


@gluon.constexpr_function
def parts_of_dq(columns, consumer):
    """Return first column and width of each part of dq that a consumer computes: its half of each part of a head.

    The first consumer computes a part of 16 columns alone.
    """
    parts = [(part_first(columns, u), part_width(columns, u)) for u in range(part_count(columns))]
    halves = [(first + consumer * width // 2, width // 2) for first, width in parts if width >= 32]
    return halves + [(first, width) for first, width in parts if width < 32 and consumer == 0]


@gluon.jit
def _start_part_of_dq(fed, shared, slot, CONSUMERS: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Start WIDTH columns of the tile of dq whose ds is in `slot`; return their token."""
    D: gl.constexpr = fed.k.shape[4]
    dq = gl.zeros([ROWS, WIDTH], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    for u in gl.static_range(CONSUMERS):
        k = fed.k.index(u + opaque_zero(slot)).reshape([ROWS, D]).slice(FIRST, WIDTH, dim=1)
        ds = shared.ds_buffers.index(slot * CONSUMERS + u).permute((1, 0))
        dq = warpgroup_mma(ds, k, dq, use_acc=u > 0, is_async=True)
    return dq


@gluon.jit
def _start_dq(fed, shared, i, CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start this consumer's parts of dq for tile i - 1, once the other's ds is ready; for tile -1, on any memory."""
    PARTS: gl.constexpr = parts_of_dq(HEAD_DIM, CONSUMER)
    SLOTS: gl.constexpr = shared.ds_full.shape[0]
    slot = (i + SLOTS - 1) % SLOTS
    mbarrier.wait(shared.ds_full.index(slot), ((i + SLOTS - 1) // SLOTS + 1) & 1)
    tokens = ()
    for u in gl.static_range(len(PARTS)):
        tokens += (_start_part_of_dq(fed, shared, slot, CONSUMERS, PARTS[u][0], PARTS[u][1]),)  # type: ignore[assignment]
    return tokens


@gluon.jit
def _tile_before(numbers, i):
    """Return the index in the group of tile i - 1; NOWHERE for tile -1."""
    return gl.where(i > 0, receive_number(numbers, (i + RING - 1) % RING * FIELDS), NOWHERE)


@gluon.jit
def _store_part_of_dq(buffers, dq, FIRST: gl.constexpr):
    """Store columns of a tile of dq, from FIRST on, in the order described in `backward_rows`."""
    WIDTH: gl.constexpr = dq.shape[1]
    LINES: gl.constexpr = WIDTH * ROWS // 32
    layout: gl.constexpr = gl.NVMMASharedLayout(buffers.layout.swizzle_byte_width, 32, 2)
    by_lane = gl.permute(gl.reshape(dq, [4, 2, 8, WIDTH // 8, 4, 2]), [0, 3, 2, 4, 1, 5])
    PARTS: gl.constexpr = buffers.shape[0] * buffers.shape[3] // LINES
    part = reinterpret(buffers, gl.float32, [PARTS, LINES, 32], layout).index(FIRST // WIDTH)
    part.store(gl.reshape(by_lane, [LINES, 32]))


@gluon.jit
def _add_dq(dq, shared, tile, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Add this consumer's unscaled parts of a tile of dq to the sums."""
    PARTS: gl.constexpr = parts_of_dq(HEAD_DIM, CONSUMER)
    buffers = shared.dq_buffers
    LINES: gl.constexpr = buffers.shape[3]  # of one addition, of ADDED columns
    ADDED: gl.constexpr = LINES * 32 // ROWS
    tma.store_wait(0)
    for u in gl.static_range(len(PARTS)):
        _store_part_of_dq(buffers, dq[u], PARTS[u][0])
    fence_async_shared()
    first_line = tile * (HEAD_DIM * ROWS // 32)
    for u in gl.static_range(len(PARTS)):
        for u_add in gl.static_range(PARTS[u][0] // ADDED, (PARTS[u][0] + PARTS[u][1]) // ADDED):
            tma_add(shared.sums_desc, [0, 0, first_line + u_add * LINES, 0], buffers.index(u_add))


@gluon.jit
def _consume_tiles(
    dk, dv, scores, shared, fed, p_bits, first_tile, keys_there, scale_log2, cap_rate, done, begin, end,
    MASKED: gl.constexpr, CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Add the contributions of tiles begin .. end - 1 of a head to dk, dv and the sums of dq."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = fed.k.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    SLOTS: gl.constexpr = shared.ds_full.shape[0]
    for i_tile in range(begin, end):
        i = done + i_tile
        stage = i % STAGES
        k = fed.k.index(CONSUMER + opaque_zero(i)).reshape([ROWS, D])
        v = fed.v.index(CONSUMER + opaque_zero(i)).reshape([ROWS, D])
        q = fed.q.index(stage).reshape([ROWS, D])
        do = fed.do.index(stage).reshape([ROWS, D])
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        if not AHEAD:
            mbarrier.wait(fed.full.index(stage), (i // STAGES) & 1)
            s_token = start_scores(k, q, zero, HEAD_DIM)
        dp_token = start_scores(v, do, zero, HEAD_DIM_V)
        if AHEAD:
            dq_tokens = _start_dq(fed, shared, i, CONSUMERS, CONSUMER, HEAD_DIM)
        lse = fed.stats.index(stage * 2).load(gl.SliceLayout(0, s_layout))
        if not AHEAD:
            scores = warpgroup_mma_wait(part_count(HEAD_DIM_V), deps=[s_token])
        scores = capped(scores, cap_rate)
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            part = i_tile % SPLIT * ROWS
            weights = keep(
                weights, fed.numbers, i % RING * FIELDS, p_bits, part, CONSUMER * ROWS, 0, Q_BLOCK, KV_BLOCK, keys_there
            )
        delta = fed.stats.index(stage * 2 + 1).load(gl.SliceLayout(0, s_layout))
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        weights = sloped(weights, scores, cap_rate)
        if AHEAD:
            mbarrier.wait(fed.full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1)
            q_next = fed.q.index((i + 1) % STAGES).reshape([ROWS, D])
            s_token = start_scores(k, q_next, zero, HEAD_DIM)
            dps, dq = wait_for_both((dp_token,), dq_tokens, part_count(HEAD_DIM))
            dp = dps[0]
        else:
            dp = warpgroup_mma_wait(0, deps=[dp_token])
        ds = (weights * (dp - delta[None, :])).to(q.dtype)
        slot = i % SLOTS
        shared.ds_buffers.index(slot * CONSUMERS + CONSUMER).store(ds)
        fence_async_shared()
        mbarrier.arrive(shared.ds_full.index(slot), count=1)
        dv_tokens = start_sums(p, do, dv, HEAD_DIM_V)
        if AHEAD:
            dk_tokens = start_sums(gl.convert_layout(ds, p_layout), q, dk, HEAD_DIM)
            _add_dq(dq, shared, first_tile + _tile_before(fed.numbers, i), CONSUMER, HEAD_DIM)
            dv, others = wait_for_both(dv_tokens, dk_tokens + (s_token,), 0)  # noqa: RUF005 (jit has no star)
            dk, scores = others[:-1], others[-1]
        else:
            dq_tokens = _start_dq(fed, shared, i, CONSUMERS, CONSUMER, HEAD_DIM)
            dk_tokens = start_sums(gl.convert_layout(ds, p_layout), q, dk, HEAD_DIM)
            dv, dq = wait_for_both(dv_tokens, dq_tokens, part_count(HEAD_DIM))
            _add_dq(dq, shared, first_tile + _tile_before(fed.numbers, i), CONSUMER, HEAD_DIM)
            dk = wait_for(dk_tokens, 0)
        mbarrier.arrive(fed.empty.index(stage), count=1)
    return dk, dv, scores


@gluon.jit
def consume(
    outputs, shared, fed, layout, column, first_tile, keys_there, scale, scale_log2, cap_rate,
    CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, HAS_PARTS: gl.constexpr, AHEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv for 64 keys of a kv block, and this consumer's columns of the block's contribution to dq."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = outputs.dk_desc.block_type.shape[3]
    dk, dv = zero_parts(ROWS, HEAD_DIM), zero_parts(ROWS, HEAD_DIM_V)
    mbarrier.wait(fed.kv_full.index(0), 0)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    scores = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    if AHEAD:
        mbarrier.wait(fed.full.index(0), 0)
        k = fed.k.index(CONSUMER).reshape([ROWS, D])
        q = fed.q.index(0).reshape([ROWS, D])
        s_token = start_scores(k, q, scores, HEAD_DIM)
        scores = warpgroup_mma_wait(0, deps=[s_token])
    done = 0
    before = 0
    p_bits = layout.tables.p_bits
    for i_group in range(column.heads):
        _, count, partial, before = read_column(layout, column, column.i_h + i_group, before, HAS_PARTS)
        if keys_there < KV_BLOCK:
            partial = count
        dk, dv, scores = _consume_tiles(
            dk, dv, scores, shared, fed, p_bits, first_tile, keys_there, scale_log2, cap_rate, done,
            0, partial * SPLIT, True, CONSUMERS, CONSUMER, Q_BLOCK, KV_BLOCK, STAGES, AHEAD,
            HEAD_DIM, HEAD_DIM_V,
        )  # fmt: skip
        dk, dv, scores = _consume_tiles(
            dk, dv, scores, shared, fed, p_bits, first_tile, keys_there, scale_log2, cap_rate, done,
            partial * SPLIT, count * SPLIT, False, CONSUMERS, CONSUMER, Q_BLOCK, KV_BLOCK, STAGES, AHEAD,
            HEAD_DIM, HEAD_DIM_V,
        )  # fmt: skip
        done += count * SPLIT
    dq = wait_for(_start_dq(fed, shared, done, CONSUMERS, CONSUMER, HEAD_DIM), 0)
    _add_dq(dq, shared, first_tile + _tile_before(fed.numbers, done), CONSUMER, HEAD_DIM)
    mbarrier.arrive(shared.kv_read.index(0), count=1)
    mbarrier.wait(shared.kv_read.index(0), 0)
    # now no consumer reads k and v again
    store_columns(dk, dv, outputs, fed, column, scale, CONSUMER, KV_BLOCK, HAS_PARTS, HEAD_DIM, HEAD_DIM_V)
