# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroup of the Hopper forward: 64 query rows, one row of blocks after another.

    k_full -> scores = q k.T (while p @ v of the previous step runs) -> softmax -> v_full -> acc += p v -> empty
    row done -> out, lse

A step starts q @ k.T of its keys and p @ v of the previous step, and computes its softmax while the latter runs. Four
threads share a row and keep separate sums until the row is done.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import mbarrier_arrive
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.attention.hopper.forward_lazy_softmax import (
    rescaled_where_grown,
    unchecked,
    weights_relative_to,
    without_maxima,
)
from dynaxx.kernels.attention.hopper.forward_produce import FIELDS, ROW_FIELDS
from dynaxx.kernels.compat import tma_store
from dynaxx.kernels.primitives.hopper.column_parts import (
    part_count,
    part_first,
    start_scores,
    start_sums,
    store_parts,
    times_rows,
    wait_for,
    zero_parts,
)
from dynaxx.kernels.primitives.hopper.parts import store_output, turns_of_program
from dynaxx.kernels.primitives.hopper.signals import after_stores, hold_before_wait, publish_number, receive_number
from dynaxx.kernels.primitives.hopper.softcap import capped
from dynaxx.kernels.primitives.hopper.tiles import tile_of_parts
from dynaxx.kernels.primitives.hopper.visible import WORD_LAYOUT, seen_of_block, where_seen

ROWS = gl.constexpr(64)  # rows per consumer warpgroup: wgmma's M
LN2 = gl.constexpr(0.6931471805599453)
SMALLEST, LARGEST = gl.constexpr(2.0**-64), gl.constexpr(2.0**64)  # range of a row's sum in which no weight is lost


class ConsumerArguments(NamedTuple):
    """Values that the consumers read and write."""

    out_desc: Any
    p_out: Any
    buffers: Any  # `ForwardBuffers`
    p_lse: Any
    p_bits: Any
    p_sums: Any  # results of parts, see `merge_parts`
    p_sums_lse: Any
    seqlen_q: Any
    q_heads: Any
    scale_log2: Any
    cap_rate: Any


@gluon.constexpr_function
def arrivals(consumers, head_dim, dtype):
    """Return the arrivals per tile on a barrier: one per consumer, or one per thread if threads run independently."""
    return 128 if without_maxima(consumers, head_dim, dtype) else 1


@gluon.constexpr_function
def _eight_columns(width):
    """Return a layout of [ROWS, width] like wgmma's, but that a thread has eight neighbouring columns, 16 bytes."""
    wider = [[0, 1 << i] for i in range(5, 8) if 1 << i < width]
    registers, lanes = [[0, 1], [0, 2], [0, 4], [8, 0], *wider], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, width])


@gluon.jit
def _store_rows(p_tile, part, given, row_q, FIRST: gl.constexpr, E: gl.constexpr):
    """Store columns of a tile of out, from FIRST on, from registers."""
    layout: gl.constexpr = _eight_columns(part.shape[1])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = FIRST + gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
    inside = (row_q + rows < given.seqlen_q)[:, None]
    if FIRST + part.shape[1] > E:
        inside = inside & (columns < E)[None, :]
    at = rows[:, None] * (given.q_heads * E) + columns[None, :]
    gl.store(p_tile + at, gl.convert_layout(part, layout), mask=inside)


@gluon.jit
def _hide(scores, first_row, numbers, stage, p_bits, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr):
    """Write -inf for pairs hidden by masks or past the last key, in the one or two blocks of a step."""
    STEP: gl.constexpr = scores.shape[1]
    if KV_BLOCK >= STEP:
        seen = seen_of_block(first_row, numbers, stage * FIELDS, p_bits, STEP, Q_BLOCK, KV_BLOCK)
    else:
        at = stage * (2 * FIELDS)
        left = seen_of_block(first_row, numbers, at, p_bits, KV_BLOCK, Q_BLOCK, KV_BLOCK)
        right = seen_of_block(first_row, numbers, at + FIELDS, p_bits, KV_BLOCK, Q_BLOCK, KV_BLOCK)
        seen = (left & 0xFFFF) | (right << 16)
    return where_seen(scores, seen, -float("inf"))


@gluon.jit
def _softmax_step(scores, row_max, row_sum, scale_log2, MASKED: gl.constexpr):
    """Return this step's weights, the new maximum (base 2), each thread's sum, and the factor for earlier sums."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    # thread t of a row has columns 2 t and 2 t + 1 of every eight
    part = gl.sum(gl.sum(gl.reshape(weights, [ROWS, weights.shape[1] // 8, 4, 2]), 3), 1)
    row_sum *= gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return weights, new_max, row_sum + gl.convert_layout(part, row_sum.type.layout), rescale


@gluon.jit
def _consume_steps(
    acc, row_max, row_sum, weights, q, given, first_row, begin, end,
    MASKED: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Attend to steps begin .. end - 1 of the program.

    Weights stay in fp32 from step to step, because bf16 would be unpacked and packed again. Full steps do not wait for
    other threads, nor for maxima if they need none (`forward_lazy_softmax`).
    """
    buffers = given.buffers
    FREE: gl.constexpr = not MASKED and without_maxima(CONSUMERS, q.shape[1], q.dtype)
    CHECKED: gl.constexpr = not FREE or not unchecked(q.dtype)
    ARRIVALS: gl.constexpr = arrivals(CONSUMERS, q.shape[1], q.dtype)
    STEP: gl.constexpr = weights.shape[1]
    s_layout: gl.constexpr = weights.type.layout
    BLOCK_E: gl.constexpr = given.out_desc.block_type.shape[3]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    if FREE:
        base = gl.zeros([ROWS, 4], gl.float32, WORD_LAYOUT)
        base += gl.convert_layout(row_max, gl.SliceLayout(1, WORD_LAYOUT))[:, None]
    if not CHECKED:  # the exponentials of the previous step hide this step's wait for k
        mbarrier.wait(buffers.k_full.index(begin % STAGES), (begin // STAGES) & 1, pred=begin < end)
    for i_step in range(begin, end):
        stage = i_step % STAGES
        before = (i_step - 1) % STAGES
        if CHECKED:
            mbarrier.wait(buffers.k_full.index(stage), (i_step // STAGES) & 1)
        zero = gl.zeros([ROWS, STEP], gl.float32, s_layout)
        k = tile_of_parts(buffers.k, stage, STEP, q.shape[1])
        s_token = start_scores(q, k, zero, HEAD_DIM)
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        mbarrier.wait(buffers.v_full.index(before), ((i_step - 1) // STAGES) & 1)
        acc_tokens = start_sums(p, tile_of_parts(buffers.v, before, STEP, BLOCK_E), acc, HEAD_DIM_V)
        scores = capped(warpgroup_mma_wait(part_count(HEAD_DIM_V), deps=[s_token]), given.cap_rate)
        if MASKED:
            scores = _hide(scores, first_row, buffers.step_numbers, stage, given.p_bits, Q_BLOCK, KV_BLOCK)
        if FREE:
            mbarrier_arrive(buffers.k_empty.index(stage), increment_count=False)
            weights, sums = weights_relative_to(base, scores, given.scale_log2)
            if not CHECKED:
                after = i_step + 1
                mbarrier.wait(buffers.k_full.index(after % STAGES), (after // STAGES) & 1, pred=after < end)
            sums = hold_before_wait(sums)
        else:
            mbarrier.arrive(buffers.k_empty.index(stage), count=ARRIVALS)
            weights, row_max, row_sum, rescale = _softmax_step(scores, row_max, row_sum, given.scale_log2, MASKED)
            row_sum = hold_before_wait(row_sum)
        acc = wait_for(acc_tokens, 0)
        if FREE:
            mbarrier_arrive(buffers.v_empty.index(before), increment_count=False)
            if CHECKED:
                weights, row_sum, base, rescaled = rescaled_where_grown(
                    weights, sums, row_sum, base, acc[0], scores, given.scale_log2
                )
                acc = (rescaled,)
            else:
                row_sum += sums
        else:
            mbarrier.arrive(buffers.v_empty.index(before), count=ARRIVALS)
            acc = times_rows(acc, rescale)
    if FREE and CHECKED:
        row_max = gl.convert_layout(gl.max(base, 1), row_max.type.layout)
    return acc, row_max, row_sum, weights


@gluon.jit
def consume(
    units, given, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, HAS_PARTS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """Attend with 64 rows of each unit of work of this program; write out and lse.

    If weights are unchecked and those of some rows left their range, a second sweep computes these units again, with
    maxima in every step. All other units then have no keys and lie past the end.
    """
    all_units, flags, judged = units
    UNCHECKED: gl.constexpr = unchecked(given.out_desc.dtype)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    done = 0  # number of steps done
    lost = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, s_layout))
    if UNCHECKED:
        i_mine = 0
        for sweep in range(2):
            if sweep == 1:
                publish_number(flags, CONSUMER, gl.max(after_stores(lost), 0))
                mbarrier.arrive(judged.index(0), count=1)
                mbarrier.wait(judged.index(0), 0)
                all_units = gl.where(receive_number(flags, 0) + receive_number(flags, CONSUMERS - 1) > 0, all_units, 0)
            for _ in range(turns_of_program(all_units)):
                done, lost = _attend(
                    given, i_mine, done, lost,
                    CONSUMER, CONSUMERS, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, HAS_PARTS,
                    HEAD_DIM, HEAD_DIM_V, E,
                )  # fmt: skip
                i_mine += 1
    else:
        for i_turn in range(turns_of_program(all_units)):
            done, lost = _attend(
                given, i_turn, done, lost,
                CONSUMER, CONSUMERS, STEP_ROWS, STEP_HEADS, Q_BLOCK, KV_BLOCK, STEP, STAGES, HAS_PARTS,
                HEAD_DIM, HEAD_DIM_V, E,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _attend(
    given, i_mine, done, lost,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, STEP_ROWS: gl.constexpr, STEP_HEADS: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, HAS_PARTS: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, E: gl.constexpr,
):  # fmt: skip
    """Attend with 64 rows of unit `i_mine` of this program; return the steps done, and which rows lost weights.

    If weights are unchecked, only masked steps use maxima; a unit that is computed again uses them in all steps.
    """
    buffers = given.buffers
    D: gl.constexpr = buffers.q.shape[4]
    BLOCK_E: gl.constexpr = given.out_desc.block_type.shape[3]
    SLOTS: gl.constexpr = buffers.q.shape[0] // CONSUMERS  # with two slots, a row's result leaves through its q buffer
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    first_row = CONSUMER * STEP_ROWS
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    slot = i_mine % SLOTS
    mbarrier.wait(buffers.q_full.index(slot), (i_mine // SLOTS) & 1)
    i_row = receive_number(buffers.row_numbers, slot * ROW_FIELDS)
    steps = receive_number(buffers.row_numbers, slot * ROW_FIELDS + 1)
    masked = receive_number(buffers.row_numbers, slot * ROW_FIELDS + 2)
    q = buffers.q.index(slot * CONSUMERS + CONSUMER).reshape([ROWS, D])

    stage = done % STAGES
    mbarrier.wait(buffers.k_full.index(stage), (done // STAGES) & 1)
    zero = gl.zeros([ROWS, STEP], gl.float32, s_layout)
    k = tile_of_parts(buffers.k, stage, STEP, q.shape[1])
    s_token = start_scores(q, k, zero, HEAD_DIM)
    if SLOTS == 2:
        tma.store_wait(0)  # the previous row's result left through its q buffer
        mbarrier.arrive(buffers.q_empty.index(1 - slot), count=1, pred=i_mine > 0)
    scores = capped(warpgroup_mma_wait(0, deps=[s_token]), given.cap_rate)
    scores = _hide(scores, first_row, buffers.step_numbers, stage, given.p_bits, Q_BLOCK, KV_BLOCK)
    mbarrier.arrive(buffers.k_empty.index(stage), count=arrivals(CONSUMERS, D, q.dtype))
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([ROWS, 4], gl.float32, WORD_LAYOUT)
    weights, row_max, row_sum, _ = _softmax_step(scores, row_max, row_sum, given.scale_log2, True)
    acc = zero_parts(ROWS, HEAD_DIM_V)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    UNCHECKED: gl.constexpr = unchecked(q.dtype)
    acc, row_max, row_sum, weights = _consume_steps(
        acc, row_max, row_sum, weights, q, given, first_row, done + 1, done + masked,
        True, Q_BLOCK, KV_BLOCK, STAGES, CONSUMERS, HEAD_DIM, HEAD_DIM_V,
    )  # fmt: skip
    if UNCHECKED:
        row_max = gl.where(row_max == -float("inf"), 0.0, row_max)
    acc, row_max, row_sum, weights = _consume_steps(
        acc, row_max, row_sum, weights, q, given, first_row, done + masked, done + steps,
        False, Q_BLOCK, KV_BLOCK, STAGES, CONSUMERS, HEAD_DIM, HEAD_DIM_V,
    )  # fmt: skip
    i_b = receive_number(buffers.row_numbers, slot * ROW_FIELDS + 3)
    i_h = receive_number(buffers.row_numbers, slot * ROW_FIELDS + 4) + CONSUMER * STEP_HEADS
    if HAS_PARTS:
        part = receive_number(buffers.row_numbers, slot * ROW_FIELDS + 5)
    if SLOTS == 1:
        mbarrier.arrive(buffers.q_empty.index(0), count=1)
    done += steps

    last = (done - 1) % STAGES
    mbarrier.wait(buffers.v_full.index(last), ((done - 1) // STAGES) & 1)
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    acc_tokens = start_sums(p, tile_of_parts(buffers.v, last, STEP, BLOCK_E), acc, HEAD_DIM_V)
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    if UNCHECKED:
        kept = (total > SMALLEST) & (total < LARGEST) | (steps == masked)
        lost = gl.where(kept, lost, 1)
    empty = total == 0
    total = gl.where(empty, 1.0, total)
    lse = gl.where(empty, -float("inf"), (row_max + gl.log2(total)) * LN2)
    if UNCHECKED:
        lse = gl.where(kept, lse, float("nan"))
    row_q = i_row * Q_BLOCK + first_row
    if HAS_PARTS:
        row_q = gl.where(part >= 0, given.seqlen_q, row_q)  # past the end, where nothing is stored
        at = (gl.maximum(part, 0).to(gl.int64) * CONSUMERS + CONSUMER) * ROWS + o_row
        gl.store(given.p_sums_lse + at, lse, mask=(o_row >= 0) & (part >= 0))
    p_row = given.p_lse + (i_b.to(gl.int64) * given.q_heads + i_h) * given.seqlen_q + row_q
    gl.store(p_row + o_row, lse, mask=row_q + o_row < given.seqlen_q)
    inverse = 1.0 / total
    acc = wait_for(acc_tokens, 0)
    mbarrier.arrive(buffers.v_empty.index(last), count=arrivals(CONSUMERS, D, q.dtype))
    acc = times_rows(acc, inverse)
    if HAS_PARTS:
        for u in gl.static_range(len(acc)):
            store_output(given.p_sums, part, acc[u], CONSUMERS, CONSUMER, BLOCK_E, part_first(HEAD_DIM_V, u))
    if SLOTS == 2:
        store_parts(q, acc, given.out_desc.dtype, HEAD_DIM_V)  # q is not read again
        fence_async_shared()
        tma_store(
            given.out_desc, [i_b, i_h, row_q, 0], buffers.q.index(slot * CONSUMERS + CONSUMER)
        )  # fmt: skip
    else:  # the buffer may contain the next row's q already
        p_tile = given.p_out + ((i_b.to(gl.int64) * given.seqlen_q + row_q) * given.q_heads + i_h) * E
        for u in gl.static_range(len(acc)):
            _store_rows(p_tile, acc[u].to(given.out_desc.dtype), given, row_q, part_first(HEAD_DIM_V, u), E)
    return done, lost
