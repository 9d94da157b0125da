# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroup of the Hopper backward over kv blocks: 64 keys, dk and dv in registers, transposed scores.

full[stage]: q, do, lse, delta -> scores.T = k q.T, dp.T = v do.T -> weights, ds -> dv += w do, dk += ds q -> empty
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from dynaxx.kernels.attention.hopper.backward_columns import read_column, store_columns
from dynaxx.kernels.attention.hopper.backward_produce import FIELDS, RING
from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.primitives.hopper.column_parts import (
    part_count,
    start_scores,
    start_sums,
    wait_for_both,
    zero_parts,
)
from dynaxx.kernels.primitives.hopper.signals import opaque_zero, receive_number
from dynaxx.kernels.primitives.hopper.softcap import capped, sloped
from dynaxx.kernels.primitives.hopper.visible import WORD_LAYOUT, columns_between, where_seen


@gluon.jit
def keep(
    weights, numbers, at, p_bits, part, first_key, FIRST_QUERY: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, keys_there=None,
):  # fmt: skip
    """Return transposed weights [64 keys, queries], with 0 for pairs hidden by the block's mask or past the last key.

    Keys count from `first_key` of the block, queries from FIRST_QUERY of the tile, which begins at `part` of the block.
    """
    WORDS: gl.constexpr = KV_BLOCK // 32
    keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, WORD_LAYOUT))[:, None]
    threads = gl.arange(0, 4, gl.SliceLayout(0, WORD_LAYOUT))[None, :]
    lo, hi, mask_id = receive_number(numbers, at + 1), receive_number(numbers, at + 2), receive_number(numbers, at + 3)
    if lo <= hi:
        seen = columns_between(keys + (lo - FIRST_QUERY), keys + (hi - FIRST_QUERY), threads)
    else:
        seen = gl.zeros([ROWS, 4], gl.int32, WORD_LAYOUT)
        if mask_id >= 0:
            p_words = p_bits + (mask_id.to(gl.int64) * Q_BLOCK + part + FIRST_QUERY) * WORDS + keys // 32
            for i_column in range(weights.shape[1] // 4):
                query = i_column // 2 * 8 + 2 * threads + i_column % 2
                seen |= ((gl.load(p_words + query * WORDS) >> keys % 32) & 1) << i_column
    if keys_there is not None:
        seen = gl.where(keys < keys_there, seen, 0)
    return where_seen(weights, seen, 0.0)


@gluon.jit
def _consume_tiles(
    dk, dv, fed, p_bits, scale_log2, cap_rate, done, begin, end,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Add the contributions of tiles begin .. end - 1 of a head to dk and dv."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = fed.k.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    for i_tile in range(begin, end):
        i = done + i_tile
        stage = i % STAGES
        k = fed.k.index(CONSUMER + opaque_zero(i)).reshape([ROWS, D])
        v = fed.v.index(CONSUMER + opaque_zero(i)).reshape([ROWS, D])
        q = fed.q.index(stage).reshape([ROWS, D])
        do = fed.do.index(stage).reshape([ROWS, D])
        mbarrier.wait(fed.full.index(stage), (i // STAGES) & 1)
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        s_token = start_scores(k, q, zero, HEAD_DIM)
        dp_token = start_scores(v, do, zero, HEAD_DIM_V)
        lse = fed.stats.index(stage * 2).load(gl.SliceLayout(0, s_layout))
        scores = capped(warpgroup_mma_wait(part_count(HEAD_DIM_V), deps=[s_token]), cap_rate)
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            part = i_tile % SPLIT * ROWS
            weights = keep(weights, fed.numbers, i % RING * FIELDS, p_bits, part, CONSUMER * ROWS, 0, Q_BLOCK, KV_BLOCK)
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        dv_tokens = start_sums(p, do, dv, HEAD_DIM_V)
        weights = sloped(weights, scores, cap_rate)
        delta = fed.stats.index(stage * 2 + 1).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(part_count(HEAD_DIM_V), deps=[dp_token])
        ds = (weights * (dp - delta[None, :])).to(q.dtype)
        dk_tokens = start_sums(gl.convert_layout(ds, p_layout), q, dk, HEAD_DIM)
        dv, dk = wait_for_both(dv_tokens, dk_tokens, 0)
        mbarrier.arrive(fed.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def consume(
    outputs, fed, layout, column, scale, scale_log2, cap_rate,
    CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    HAS_PARTS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv for 64 keys of a kv block."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    dk, dv = zero_parts(ROWS, HEAD_DIM), zero_parts(ROWS, HEAD_DIM_V)
    mbarrier.wait(fed.kv_full.index(0), 0)
    done = 0
    before = 0
    p_bits = layout.tables.p_bits
    for i_group in range(column.heads):
        _, count, partial, before = read_column(layout, column, column.i_h + i_group, before, HAS_PARTS)
        dk, dv = _consume_tiles(
            dk, dv, fed, p_bits, scale_log2, cap_rate, done, 0, partial * SPLIT,
            True, CONSUMER, Q_BLOCK, KV_BLOCK, STAGES, HEAD_DIM, HEAD_DIM_V,
        )  # fmt: skip
        dk, dv = _consume_tiles(
            dk, dv, fed, p_bits, scale_log2, cap_rate, done, partial * SPLIT, count * SPLIT,
            False, CONSUMER, Q_BLOCK, KV_BLOCK, STAGES, HEAD_DIM, HEAD_DIM_V,
        )  # fmt: skip
        done += count * SPLIT
    store_columns(dk, dv, outputs, fed, column, scale, CONSUMER, KV_BLOCK, HAS_PARTS, HEAD_DIM, HEAD_DIM_V)
