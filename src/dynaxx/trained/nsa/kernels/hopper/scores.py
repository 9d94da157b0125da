# SPDX-License-Identifier: Apache-2.0
"""Scores of selection blocks for Hopper, in Gluon: one producer warp and a few consumers.

    producer warp          q rows and lse of the group's q heads, one head after another
    consumer warpgroup     128 compressed tokens: sum over heads of exp(q @ k_cmp - lse) -> pooled to block scores

A program processes units of work one after another: 64 queries of a selection head and some compressed tokens.
Consumers take turns with the tensor cores; otherwise they would all multiply, and then all compute exponentials, at the
same time. Names and results are those of `kernels.nsa.gpu.select`.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import mbarrier_arrive
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dynaxx.kernels.attention.hopper.forward_consume import ROWS
from dynaxx.kernels.compat import tma_load
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.descriptors import LOG2E, dense_rows
from dynaxx.kernels.primitives.hopper.signals import NUMBERS, barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.select import FIELDS, ScoreTensors
from dynaxx.trained.nsa.kernels.gpu.top import strides_per
from dynaxx.trained.nsa.kernels.hopper.selected_tiles import descriptor, registers
from dynaxx.trained.nsa.spans import NsaSpans

LOG2E_ = gl.constexpr(LOG2E)
FIELDS_ = gl.constexpr(FIELDS)
CONSUMERS = gl.constexpr(3)
THREADS = gl.constexpr(128)  # threads per consumer; each arrives separately, so that they do not wait for one another
TOKENS = gl.constexpr(128)  # compressed tokens per consumer
STAGES = gl.constexpr(5)  # q heads in flight
TILE_ROWS = 64  # queries per unit


@gluon.jit
def _produce(
    p_units, all_units, heads, heads_per_kv, q_desc, k_desc, p_lse, queries, q_buffers, k_buffers, lse_buffers,
    k_full, k_empty, full, empty, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    step = 0
    for i_unit in range(gl.program_id(0), all_units, gl.num_programs(0)):
        turn = i_unit // gl.num_programs(0)
        i_head = i_unit % heads
        p_unit = p_units + i_unit // heads * FIELDS_
        first_t, end_t, first_key = gl.load(p_unit), gl.load(p_unit + 1), gl.load(p_unit + 4) + gl.load(p_unit + 2)
        for u in gl.static_range(CONSUMERS):
            mbarrier.wait(k_empty.index(u), (turn & 1) ^ 1)
            mbarrier.expect(k_full.index(u), k_desc.block_type.nbytes)
            at = [i_head // heads_per_kv, first_key + u * TOKENS, 0]
            tma_load(k_desc, at, k_full.index(u), k_buffers.index(u))
        t = first_t + gl.arange(0, ROWS, layout)
        p_row = p_lse + (i_head * GROUP).to(gl.int64) * queries + t
        for member in range(GROUP):
            lse = gl.load(p_row + member * queries.to(gl.int64), mask=t < end_t, other=float("inf"))
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            lse_buffers.index(stage).store(lse * LOG2E_)
            mbarrier.expect(full.index(stage), q_desc.block_type.nbytes)
            at = [first_t, i_head * GROUP + member, 0]
            tma_load(q_desc, at, full.index(stage), q_buffers.index(stage))
            step += 1


@gluon.jit
def _store_rows(p_rows, values, first_row, end_row, first_block, blocks, row_stride):
    """Store [64, blocks of a consumer] in the existing rows of fp32 scores."""
    BLOCKS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    block = first_block + gl.arange(0, BLOCKS, gl.SliceLayout(0, layout))
    mask = (row < end_row)[:, None] & (block < blocks)[None, :]
    offsets = row.to(gl.int64)[:, None] * row_stride + block[None, :]
    gl.store(p_rows + offsets, gl.convert_layout(values, layout), mask=mask)


@gluon.jit
def _pool(
    total, p_own, p_next, p_num_cmp, first_t, end_t, least, first_row, first_token, i_head, heads, blocks,
    PER_TOKEN: gl.constexpr, PER_BLOCK: gl.constexpr, MAX: gl.constexpr,
):  # fmt: skip
    """Pool the weights of 128 tokens to scores of their blocks, and of the blocks after these."""
    layout: gl.constexpr = total.type.layout
    BLOCKS: gl.constexpr = TOKENS // PER_BLOCK
    t = first_t + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    if first_token + TOKENS > least:  # otherwise all queries see all tokens
        seen = gl.load(p_num_cmp + t, mask=t < end_t, other=0)
        total = gl.where(token[None, :] < seen[:, None], total, 0.0)
    by_block = gl.reshape(total, [ROWS, BLOCKS, PER_BLOCK])
    places: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, by_block.type.layout))
    shared = gl.minimum(PER_BLOCK - gl.arange(0, PER_BLOCK, places), PER_TOKEN)[None, None, :]
    own = gl.max(by_block, 2) if MAX else gl.sum(by_block * shared, 2)
    row, first_block = first_t - first_row, first_token // TOKENS * BLOCKS
    p_own += i_head * blocks
    _store_rows(p_own, own, row, end_t - first_row, first_block, blocks, heads * blocks)
    if PER_TOKEN > 1:
        over = PER_TOKEN - shared  # strides that lie in the next block; 0 if there are none, as weights are >= 0
        behind = gl.max(gl.where(over > 0, by_block, 0.0), 2) if MAX else gl.sum(by_block * over, 2)
        p_next += i_head * blocks
        _store_rows(p_next, behind, row, end_t - first_row, first_block + 1, blocks, heads * blocks)


@gluon.jit
def _consume(
    arguments, CONSUMER: gl.constexpr, GROUP: gl.constexpr, PER_TOKEN: gl.constexpr, PER_BLOCK: gl.constexpr,
    MAX: gl.constexpr,
):  # fmt: skip
    (
        q_buffers, k_buffers, lse_buffers, k_full, k_empty, full, empty, turns, p_units, all_units, p_own, p_next,
        p_num_cmp, first_row, heads, sixteens, scale_log2,
    ) = arguments  # fmt: skip
    D: gl.constexpr = q_buffers.shape[3]
    FIRST: gl.constexpr = 1 if CONSUMER == 0 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    zero = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    step = 0
    p_unit = p_units + gl.program_id(0) // heads * FIELDS_
    next_t, next_end, next_token = gl.load(p_unit), gl.load(p_unit + 1), gl.load(p_unit + 2)
    next_most, next_least = gl.load(p_unit + 3), gl.load(p_unit + 5)
    for i_unit in range(gl.program_id(0), all_units, gl.num_programs(0)):
        first_t, end_t, first_token, most, least = next_t, next_end, next_token, next_most, next_least
        p_unit = p_units + gl.minimum(i_unit + gl.num_programs(0), all_units - 1) // heads * FIELDS_
        next_t, next_end, next_token = gl.load(p_unit), gl.load(p_unit + 1), gl.load(p_unit + 2)
        next_most, next_least = gl.load(p_unit + 3), gl.load(p_unit + 5)
        first_token += CONSUMER * TOKENS
        turn = i_unit // gl.num_programs(0)
        mbarrier.wait(k_full.index(CONSUMER), turn & 1)
        k = k_buffers.index(CONSUMER).reshape([TOKENS, D])
        total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
        if first_token < most:
            for _ in range(GROUP):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                lse = lse_buffers.index(stage).load(gl.SliceLayout(1, layout))
                mbarrier.wait(turns.index(CONSUMER), (step + FIRST) & 1)
                q = q_buffers.index(stage).reshape([ROWS, D])
                s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[s_token])
                mbarrier_arrive(turns.index((CONSUMER + 1) % CONSUMERS), increment_count=False)
                mbarrier_arrive(empty.index(stage), increment_count=False)
                total += gl.exp2(scores * scale_log2 - lse[:, None])
                step += 1
        else:  # tokens after all those that these queries see
            for _ in range(GROUP):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.wait(turns.index(CONSUMER), (step + FIRST) & 1)
                mbarrier_arrive(turns.index((CONSUMER + 1) % CONSUMERS), increment_count=False)
                mbarrier_arrive(empty.index(stage), increment_count=False)
                step += 1
        mbarrier_arrive(k_empty.index(CONSUMER), increment_count=False)
        if first_token < most:
            _pool(
                total, p_own, p_next, p_num_cmp, first_t, end_t, least, first_row, first_token, i_unit % heads, heads,
                sixteens * 16, PER_TOKEN, PER_BLOCK, MAX,
            )  # fmt: skip


@kernel_launcher
@gluon.jit(do_not_specialize=["all_units", "first_row", "queries", "heads", "heads_per_kv", "sixteens"])
def _nsa_scores_hopper_kernel(
    q_desc, k_desc, p_lse, p_own, p_next, p_units, p_num_cmp,
    all_units, first_row, queries, heads, heads_per_kv, sixteens, scale_log2,
    GROUP: gl.constexpr, PER_TOKEN: gl.constexpr, PER_BLOCK: gl.constexpr, MAX: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[2]
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 1, D], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, TOKENS, D], k_desc.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], NUMBERS)
    k_full, k_empty = barriers(CONSUMERS, 1), barriers(CONSUMERS, THREADS)
    full, empty = barriers(STAGES, 1), barriers(STAGES, CONSUMERS * THREADS)
    turns = barriers(CONSUMERS, THREADS)
    arguments = (
        q_buffers, k_buffers, lse_buffers, k_full, k_empty, full, empty, turns, p_units, all_units, p_own, p_next,
        p_num_cmp, first_row, heads, sixteens, scale_log2,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (arguments, 0, GROUP, PER_TOKEN, PER_BLOCK, MAX)),
        (_consume, (arguments, 1, GROUP, PER_TOKEN, PER_BLOCK, MAX)),
        (_consume, (arguments, 2, GROUP, PER_TOKEN, PER_BLOCK, MAX)),
        (_produce, (
            p_units, all_units, heads, heads_per_kv, q_desc, k_desc, p_lse, queries, q_buffers, k_buffers, lse_buffers,
            k_full, k_empty, full, empty, GROUP,
        )),
    ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def score_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, scores: ScoreTensors, scale: float
) -> None:
    """Fill `scores` for tiles of 64 rows; this is an `nsa.select.Scorer`. lse must not be None."""
    assert lse is not None, "Triton computes raw scores"
    heads, blocks = scores.own.shape[1:]
    units = scores.tiles.units(scores.some, CONSUMERS.value * TOKENS.value, TOKENS.value)
    all_units = len(units) * heads
    if not all_units:
        return
    q, k_cmp = (dense_rows(x[None])[0] for x in (q, k_cmp))
    per_token, per_block = strides_per(spans.sizes)
    group_size, dim = q.shape[1] // heads, q.shape[2]
    _nsa_scores_hopper_kernel[(min(all_units, processors(q.device)),)](
        descriptor(q, (TILE_ROWS, 1, dim)),
        descriptor(k_cmp.transpose(0, 1), (1, TOKENS.value, dim)),
        lse.contiguous(),
        scores.own,
        scores.behind,
        units,
        spans.num_cmp,
        all_units=all_units,
        first_row=scores.first_row,
        queries=q.shape[0],
        heads=heads,
        heads_per_kv=heads // k_cmp.shape[1],
        sixteens=blocks // 16,
        scale_log2=scale * LOG2E,
        GROUP=group_size,
        PER_TOKEN=per_token,
        PER_BLOCK=per_block,
        MAX=spans.sizes.pool == "max",
        **registers(CONSUMERS.value),
    )
