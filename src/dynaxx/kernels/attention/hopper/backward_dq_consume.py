# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroup of dq on Hopper: 64 queries of one head, dq in registers, tiles of 64 keys in turn.

k_full: scores = q k.T -> weights
v_full: dp = do v.T -> ds = weights (dp - delta) -> v_empty -> dq += ds k -> k_empty
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import tma_store
from dynaxx.kernels.primitives.hopper.column_parts import (
    part_count,
    part_first,
    start_scores,
    start_sums,
    store_parts,
    times,
    wait_for,
    zero_parts,
)
from dynaxx.kernels.primitives.hopper.parts import store_output
from dynaxx.kernels.primitives.hopper.signals import hold_before_wait, opaque_zero
from dynaxx.kernels.primitives.hopper.softcap import capped, sloped
from dynaxx.kernels.primitives.hopper.visible import seen_of_block, where_seen

FIELDS = gl.constexpr(4)  # numbers per tile: first and last distance of its mask, number of keys, mask id


class DqBuffers(NamedTuple):
    """Shared memory between the producer and the consumers of dq, and its barriers."""

    q: Any
    do: Any
    k: Any
    v: Any
    numbers: Any
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class DqRow(NamedTuple):
    """The row of blocks that a program visits for its queries."""

    i_b: Any
    i_h: Any
    i_row: Any
    start: Any  # first entry
    count: Any  # entries
    tail: Any  # 1 if seqlen_k may cut the last full block, which then comes first
    masked: Any  # tiles that need a mask
    tiles: Any
    part: Any  # number of the part, or -1


@gluon.jit
def _keep(weights, numbers, at, first_row, part, p_bits, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr):
    """Return weights [64 queries, 64 keys], with 0 for pairs hidden by a block's mask or past the last key.

    Keys count from `part` of the block, and so do the distances that the producer wrote.
    """
    seen = seen_of_block(first_row, numbers, at, p_bits, ROWS, Q_BLOCK, KV_BLOCK, part)
    return where_seen(weights, seen, 0.0)


@gluon.jit
def _consume_tiles(
    dq, lse, delta, buffers, p_bits, first_row, scale_log2, cap_rate, begin, end,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr,
    KV_BLOCK: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Add the contributions of tiles begin .. end - 1 of a row to dq."""
    SPLIT: gl.constexpr = KV_BLOCK // ROWS
    D: gl.constexpr = buffers.k.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dq[0].type.layout, 2)
    for i in range(begin, end):
        stage = i % K_STAGES
        q = buffers.q.index(CONSUMER + opaque_zero(i)).reshape([ROWS, D])
        do = buffers.do.index(CONSUMER + opaque_zero(i)).reshape([ROWS, D])
        k = buffers.k.index(stage).reshape([ROWS, D])
        v_stage = i % V_STAGES
        v = buffers.v.index(v_stage).reshape([ROWS, D])
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        mbarrier.wait(buffers.k_full.index(stage), (i // K_STAGES) & 1)
        s_token = start_scores(q, k, zero, HEAD_DIM)
        mbarrier.wait(buffers.v_full.index(v_stage), (i // V_STAGES) & 1)
        dp_token = start_scores(do, v, zero, HEAD_DIM_V)
        scores = capped(warpgroup_mma_wait(part_count(HEAD_DIM_V), deps=[s_token]), cap_rate)
        weights = gl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            part = i % SPLIT * ROWS
            weights = _keep(weights, buffers.numbers, stage * FIELDS, first_row, part, p_bits, Q_BLOCK, KV_BLOCK)
        weights = sloped(weights, scores, cap_rate)
        hold_before_wait(
            gl.sum(gl.sum(gl.reshape(weights, [ROWS, ROWS // 8, 4, 2]), 3), 1) + opaque_zero(i).to(gl.float32)
        )
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        mbarrier.arrive(buffers.v_empty.index(v_stage), count=1)
        ds = gl.convert_layout((weights * (dp - delta[:, None])).to(q.dtype), ds_layout)
        dq = wait_for(start_sums(ds, k, dq, HEAD_DIM), 0)
        mbarrier.arrive(buffers.k_empty.index(stage), count=1)
    return dq


@gluon.jit
def consume(
    outputs, buffers, row, p_lse, p_delta, p_bits, q_blocks, q_heads, scale, scale_log2, cap_rate,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_PARTS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Compute dq for 64 queries."""
    dq_desc, p_sums = outputs
    D: gl.constexpr = dq_desc.block_type.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    i_b, i_h, i_row, part = row.i_b, row.i_h + CONSUMER * STEP_HEADS, row.i_row, row.part
    first_row = CONSUMER * STEP_ROWS
    at = (i_b.to(gl.int64) * q_heads + i_h) * (q_blocks * Q_BLOCK) + gl.minimum(i_row, q_blocks - 1) * Q_BLOCK
    o_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    lse, delta = gl.load(p_lse + at + o_row), gl.load(p_delta + at + o_row)
    dq = zero_parts(ROWS, HEAD_DIM)
    mbarrier.wait(buffers.q_full.index(0), 0)
    dq = _consume_tiles(
        dq, lse, delta, buffers, p_bits, first_row, scale_log2, cap_rate, 0, row.masked,
        True, CONSUMER, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES, HEAD_DIM, HEAD_DIM_V,
    )  # fmt: skip
    dq = _consume_tiles(
        dq, lse, delta, buffers, p_bits, first_row, scale_log2, cap_rate, row.masked, row.tiles,
        False, CONSUMER, Q_BLOCK, KV_BLOCK, K_STAGES, V_STAGES, HEAD_DIM, HEAD_DIM_V,
    )  # fmt: skip
    if HAS_PARTS:
        for u in gl.static_range(len(dq)):
            store_output(p_sums, part, dq[u], CONSUMERS, CONSUMER, D, part_first(HEAD_DIM, u))
        i_row = gl.where(part >= 0, q_blocks, i_row)  # past the end, where TMA stores nothing
    q = buffers.q.index(CONSUMER).reshape([ROWS, D])  # is not read again
    store_parts(q, times(dq, scale), dq_desc.dtype, HEAD_DIM)
    fence_async_shared()
    tma_store(dq_desc, [i_b, i_h, i_row * Q_BLOCK + first_row, 0], buffers.q.index(CONSUMER))
    tma.store_wait(0)
