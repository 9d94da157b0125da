# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroups of dk and dv for head_dim 256 on Hopper: one computes dv of 64 keys, the other one dk.

    dv consumer   scores.T = k q.T -> weights (to shared memory) -> dv += weights do
    dk consumer   dp.T = v do.T -> ds = weights (dp - delta) -> dk += ds q

Each result fills the registers of a warpgroup. While one consumer waits, the tensor cores serve the other one.
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

from dynaxx.kernels.attention.hopper.backward_columns import read_column
from dynaxx.kernels.attention.hopper.backward_consume import keep
from dynaxx.kernels.attention.hopper.backward_produce import FIELDS, RING
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import tma_store
from dynaxx.kernels.primitives.hopper.parts import WHOLE, store_part
from dynaxx.kernels.primitives.hopper.signals import opaque_zero
from dynaxx.kernels.primitives.hopper.softcap import capped, sloped

SLOTS = gl.constexpr(2)  # tiles whose weights are in shared memory
LINES = gl.constexpr(128)  # lines of 32 numbers that hold a tile of weights in shared memory
LINES_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))


class SharedWeights(NamedTuple):
    """Weights on their way from the dv consumer to the dk consumer, and their barriers by slot."""

    buffers: Any
    full: Any
    empty: Any


@gluon.jit
def _by_lane(tile):
    """Rearrange a [64, 64] tile into lines in which each thread's numbers come in fours, next to its neighbour's."""
    return gl.reshape(gl.permute(gl.reshape(tile, [4, 2, 8, 8, 4, 2]), [0, 3, 2, 4, 1, 5]), [LINES, 32])


@gluon.jit
def _by_row(lines):
    """Return the inverse of `_by_lane`."""
    return gl.reshape(gl.permute(gl.reshape(lines, [4, 8, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5]), [ROWS, ROWS])


@gluon.jit
def _add_dv(
    dv, fed, shared, p_bits, first_key, scale_log2, cap_rate, done, begin, end,
    MASKED: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the contributions of tiles begin .. end - 1 of a head to dv, and write their weights to shared memory."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = dv.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    for i_tile in range(begin, end):
        i = done + i_tile
        stage = i % STAGES
        slot = i % SLOTS
        k = fed.k.index(opaque_zero(i)).reshape([ROWS, D])
        q = fed.q.index(stage).reshape([ROWS, D])
        do = fed.do.index(stage).reshape([ROWS, D])
        mbarrier.wait(fed.full.index(stage), (i // STAGES) & 1)
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = fed.stats.index(stage * 2).load(gl.SliceLayout(0, s_layout))
        scores = capped(warpgroup_mma_wait(0, deps=[s_token]), cap_rate)
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            part = i_tile % SPLIT * ROWS
            weights = keep(weights, fed.numbers, i % RING * FIELDS, p_bits, part, first_key, 0, Q_BLOCK, KV_BLOCK)
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        dv_token = warpgroup_mma(p, do, dv, is_async=True)
        mbarrier.wait(shared.empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        shared.buffers.index(slot).store(_by_lane(sloped(weights, scores, cap_rate)))
        mbarrier.arrive(shared.full.index(slot), count=1)
        dv = warpgroup_mma_wait(0, deps=[dv_token])
        mbarrier.arrive(fed.empty.index(stage), count=1)
    return dv


@gluon.jit
def _add_dk(dk, fed, shared, done, count, STAGES: gl.constexpr):
    """Add the contributions of the next `count` tiles to dk."""
    D: gl.constexpr = dk.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    for i_tile in range(count):  # does not start at `done`, which triton 3.6's loop-aware CSE would take for constant
        i = done + i_tile
        stage = i % STAGES
        slot = i % SLOTS
        v = fed.v.index(opaque_zero(i)).reshape([ROWS, D])
        q = fed.q.index(stage).reshape([ROWS, D])
        do = fed.do.index(stage).reshape([ROWS, D])
        mbarrier.wait(fed.full.index(stage), (i // STAGES) & 1)
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        delta = fed.stats.index(stage * 2 + 1).load(gl.SliceLayout(0, s_layout))
        lines_layout: gl.constexpr = _by_lane(zero).type.layout
        mbarrier.wait(shared.full.index(slot), (i // SLOTS) & 1)
        weights = gl.convert_layout(_by_row(shared.buffers.index(slot).load(lines_layout)), s_layout)
        mbarrier.arrive(shared.empty.index(slot), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        ds = gl.convert_layout((weights * (dp - delta[None, :])).to(q.dtype), ds_layout)
        dk_token = warpgroup_mma(ds, q, dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        mbarrier.arrive(fed.empty.index(stage), count=1)
    return dk


@gluon.jit
def _store(
    x, desc, buffer, p_sums, column, first_key, AT: gl.constexpr, KV_BLOCK: gl.constexpr, HAS_PARTS: gl.constexpr, scale
):
    """Store dk or dv of 64 keys through a buffer that is not read again."""
    D: gl.constexpr = x.shape[1]
    buffer.reshape([ROWS, D]).store((x * scale).to(desc.dtype))
    fence_async_shared()
    i_col = column.i_col
    if HAS_PARTS:
        if column.slot >= 0:
            store_part(p_sums, column.slot, x, AT, first_key, KV_BLOCK, x.shape[1], 0)
        i_col = gl.where(column.slot == WHOLE, i_col, column.kv_blocks)  # past the end, where TMA stores nothing
    at = [column.i_b, column.i_piece, i_col * KV_BLOCK + first_key, 0]
    tma_store(desc, at, buffer)
    tma.store_wait(0)


@gluon.jit
def consume_dv(
    dv_desc, p_sums, fed, shared, layout, column, first_key, scale_log2, cap_rate,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Compute dv for 64 keys, starting at `first_key` of a kv block."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = dv_desc.block_type.shape[3]
    dv = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    mbarrier.wait(fed.kv_full.index(0), 0)
    done = 0
    before = 0
    p_bits = layout.tables.p_bits
    for i_group in range(column.heads):
        _, count, partial, before = read_column(layout, column, column.i_h + i_group, before, HAS_PARTS)
        dv = _add_dv(
            dv, fed, shared, p_bits, first_key, scale_log2, cap_rate, done, 0, partial * SPLIT,
            True, Q_BLOCK, KV_BLOCK, STAGES,
        )  # fmt: skip
        dv = _add_dv(
            dv, fed, shared, p_bits, first_key, scale_log2, cap_rate, done, partial * SPLIT, count * SPLIT,
            False, Q_BLOCK, KV_BLOCK, STAGES,
        )  # fmt: skip
        done += count * SPLIT
    # the other consumer does not read k
    _store(dv, dv_desc, fed.k.index(0), p_sums, column, first_key, 1, KV_BLOCK, HAS_PARTS, 1.0)


@gluon.jit
def consume_dk(
    dk_desc, p_sums, fed, shared, layout, column, first_key, scale,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Compute dk for 64 keys, starting at `first_key` of a kv block."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = dk_desc.block_type.shape[3]
    dk = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    mbarrier.wait(fed.kv_full.index(0), 0)
    done = 0
    before = 0
    for i_group in range(column.heads):
        _, count, _, before = read_column(layout, column, column.i_h + i_group, before, HAS_PARTS)
        dk = _add_dk(dk, fed, shared, done, count * SPLIT, STAGES)
        done += count * SPLIT
    # the other consumer does not read v
    _store(dk, dk_desc, fed.v.index(0), p_sums, column, first_key, 0, KV_BLOCK, HAS_PARTS, scale)
