# SPDX-License-Identifier: Apache-2.0
"""The two warpgroups that compute the forward of latent attention: one turn of two tiles after another.

    warpgroup 0    softmax of tile 0 -> sums += p0 v0 -> p0 to memory -> sums += p1 v1, and scores of the next tile 0
    warpgroup 1    scores of tile 1  -> softmax of tile 1 -> sums += p1 v1, p1 to memory -> sums += p0 v0

Warpgroup 1 receives the base of tile 0's weights and passes on its own, by which p0 is multiplied before it goes to
memory. One warpgroup therefore computes its softmax while the other's products run. p lies where the last 64 columns of
the tile were, which only scores read.

Weights are relative to a base per row, which follows the row's maximum only when the maximum exceeds it by `GROWN`.
Sums are therefore rarely multiplied.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.compat import barrier
from dynaxx.kernels.primitives.hopper.signals import opaque_zero
from dynaxx.trained.tokens.kernels.hopper.gather import GATHERED, ROWS, WIDE, copy_rows, listed_tokens
from dynaxx.trained.tokens.kernels.hopper.rescale import rescaled

KEYS = gl.constexpr(64)  # keys per tile
HALF = gl.constexpr(256)  # columns of the values that a warpgroup adds up
GROWN = gl.constexpr(8.0)  # in base 2: weights are at most 256, which fp16 can represent
LN2 = gl.constexpr(0.6931471805599453)
# barriers of the parts of both tiles; the last columns belong to the part that is named with them
LEFT_0, RIGHT_0 = gl.constexpr(0), gl.constexpr(1)  # right and last columns of tile 0
LEFT_1, RIGHT_1 = gl.constexpr(2), gl.constexpr(3)  # left and last columns of tile 1
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROW, SUMS_ROW = gl.constexpr(gl.SliceLayout(1, SCORES)), gl.constexpr(gl.SliceLayout(1, SUMS))
P_OPERAND = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))


class Columns(NamedTuple):
    """Shared memory of q heads or of keys, [1, rows, columns]."""

    left: Any  # columns 0 to 255
    right: Any  # 256 to 511
    rest: Any  # 512 to 575


class Shared(NamedTuple):
    """Shared memory and barriers of a program."""

    q: Any  # `Columns`
    tile_0: Any
    tile_1: Any
    numbers: Any  # [2, ROWS] fp32, that each warpgroup shows the other
    full: Any  # [4]: a part was gathered
    empty: Any  # [4]: a part was read
    numbers_ready: Any  # [2]
    weights_ready: Any  # [2]: p of a warpgroup's tile is in memory
    q_ready: Any


class Results(NamedTuple):
    """Pointers of a query."""

    p_q: Any
    p_out: Any
    p_lse: Any


class Sizes(NamedTuple):
    """Numbers that both warpgroups need."""

    slots: Any
    turns: Any
    last: Any  # token that the query sees
    scale_log2: Any
    queries: Any
    first_head: Any  # first q head of the program
    group_size: Any  # q heads
    q_stride: Any  # elements from one head to the next
    out_stride: Any


@gluon.jit
def _arrive(signal):
    """Signal that all threads of the warpgroup came here."""
    barrier()
    mbarrier.arrive(signal, count=1)


@gluon.jit
def _show(shared, values, OWN: gl.constexpr):
    """Show `values` [ROWS] to the other warpgroup."""
    shared.numbers.index(OWN).store(values)
    _arrive(shared.numbers_ready.index(OWN))


@gluon.jit
def _shown(shared, phase, OWN: gl.constexpr):
    """Return the values [ROWS] that the other warpgroup shows."""
    mbarrier.wait(shared.numbers_ready.index(1 - OWN), phase)
    return shared.numbers.index(1 - OWN).load(ROW)


@gluon.jit
def _listed(p_list, i_tile, slots):
    """Return the keys of a tile, along its scores."""
    return listed_tokens(p_list, i_tile, slots, KEYS, gl.SliceLayout(0, SCORES))


@gluon.jit
def _masked(scores, key, sizes):
    """Return scores in base 2, -inf where there is no key."""
    there = (key >= 0) & (key <= sizes.last)
    return gl.where(there[None, :], scores * sizes.scale_log2, -float("inf"))


@gluon.jit
def _weights(scores, base, before, row_sum, sums):
    """Return the weights of a tile, and the row's sum and `sums`, relative to `base` instead of `before`."""
    shift = gl.where(base == -float("inf"), 0.0, base)
    factor = gl.exp2(before - shift)
    weights = gl.exp2(scores - shift[:, None])
    row_sum = row_sum * factor + gl.sum(weights, 1)
    return weights, row_sum, rescaled(sums, gl.convert_layout(factor, SUMS_ROW))


@gluon.jit
def _start_left(shared, phase, i):
    """Start the scores of tile 0: columns 0 to 255."""
    mbarrier.wait(shared.full.index(LEFT_0), phase)
    fence_async_shared()
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    keys = shared.tile_0.left.index(i).permute((1, 0))
    return warpgroup_mma(shared.q.left.index(i), keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _start_right(shared, phase, i, token):
    """Add the other columns to the scores of tile 0."""
    mbarrier.wait(shared.full.index(RIGHT_0), phase)
    fence_async_shared()
    right, rest = shared.tile_0.right.index(i).permute((1, 0)), shared.tile_0.rest.index(i).permute((1, 0))
    token = warpgroup_mma(shared.q.right.index(i), right, token, is_async=True)
    return warpgroup_mma(shared.q.rest.index(i), rest, token, is_async=True)


@gluon.jit
def _turn_of_first(scores, sums, base, row_sum, shared, p_list, sizes, i_turn, LAST: gl.constexpr):
    """Process a turn of warpgroup 0; return the masked scores of the next turn's tile, and the sums."""
    dtype: gl.constexpr = shared.q.left.dtype
    i = opaque_zero(i_turn)
    phase = i_turn & 1
    own_max = gl.max(scores, 1)
    own_base = gl.where(own_max > base + GROWN, own_max, base)
    _show(shared, own_base, 0)
    weights, row_sum, sums = _weights(scores, own_base, base, row_sum, sums)
    acc = warpgroup_mma(
        gl.convert_layout(weights.to(dtype), P_OPERAND), shared.tile_0.left.index(i), sums, is_async=True
    )
    base = _shown(shared, phase, 0)
    factor = gl.exp2(own_base - gl.where(base == -float("inf"), 0.0, base))
    shared.tile_0.rest.index(i).store((weights * factor[:, None]).to(dtype))
    fence_async_shared()
    _arrive(shared.weights_ready.index(0))
    row_sum = row_sum * factor
    sums = warpgroup_mma_wait(0, deps=[acc])
    _arrive(shared.empty.index(LEFT_0))
    sums = rescaled(sums, gl.convert_layout(factor, SUMS_ROW))
    mbarrier.wait(shared.weights_ready.index(1), phase)
    acc = warpgroup_mma(shared.tile_1.rest.index(i), shared.tile_1.left.index(i), sums, is_async=True)
    if LAST:
        sums = warpgroup_mma_wait(0, deps=[acc])
    else:
        token = _start_left(shared, phase ^ 1, i)
        key = _listed(p_list, 2 * i_turn + 2, sizes.slots)
        sums = warpgroup_mma_wait(1, deps=[acc])
        _arrive(shared.empty.index(LEFT_1))
        token = _start_right(shared, phase ^ 1, i, token)
        scores = _masked(warpgroup_mma_wait(0, deps=[token]), key, sizes)
    return scores, sums, base, row_sum


@gluon.jit
def consume_first(shared, p_list, results, sizes):
    """Compute the scores of tiles 0, and the sums of columns 0 to 255."""
    _load_queries(shared, results, sizes, 0)
    sums = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    base = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    i = opaque_zero(sizes.turns)
    key = _listed(p_list, 0, sizes.slots)
    token = _start_right(shared, 0, i, _start_left(shared, 0, i))
    scores = _masked(warpgroup_mma_wait(0, deps=[token]), key, sizes)
    last_turn = sizes.turns - 1
    for i_turn in range(last_turn):
        scores, sums, base, row_sum = _turn_of_first(scores, sums, base, row_sum, shared, p_list, sizes, i_turn, False)
    scores, sums, base, row_sum = _turn_of_first(scores, sums, base, row_sum, shared, p_list, sizes, last_turn, True)
    _finish(shared, sums, base, row_sum, results, sizes, 0)


@gluon.jit
def consume_second(shared, p_list, results, sizes):
    """Compute the scores of tiles 1, and the sums of columns 256 to 511."""
    dtype: gl.constexpr = shared.q.left.dtype
    q, tile = shared.q, shared.tile_1
    _load_queries(shared, results, sizes, 1)
    sums = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    base = gl.full([ROWS], -float("inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    for i_turn in range(sizes.turns):
        i = opaque_zero(i_turn)
        phase = i_turn & 1
        mbarrier.wait(shared.full.index(RIGHT_1), phase)
        fence_async_shared()
        zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        token = warpgroup_mma(q.right.index(i), tile.right.index(i).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(shared.full.index(LEFT_1), phase)
        fence_async_shared()
        token = warpgroup_mma(q.left.index(i), tile.left.index(i).permute((1, 0)), token, is_async=True)
        token = warpgroup_mma(q.rest.index(i), tile.rest.index(i).permute((1, 0)), token, is_async=True)
        key = _listed(p_list, 2 * i_turn + 1, sizes.slots)
        scores = _masked(warpgroup_mma_wait(0, deps=[token]), key, sizes)
        own_max = gl.max(scores, 1)
        before, base = base, _shown(shared, phase, 1)
        base = gl.where(own_max > base + GROWN, own_max, base)
        _show(shared, base, 1)
        weights, row_sum, sums = _weights(scores, base, before, row_sum, sums)
        weights = weights.to(dtype)
        acc = warpgroup_mma(gl.convert_layout(weights, P_OPERAND), tile.right.index(i), sums, is_async=True)
        tile.rest.index(i).store(weights)
        fence_async_shared()
        _arrive(shared.weights_ready.index(1))
        mbarrier.wait(shared.weights_ready.index(0), phase)
        acc = warpgroup_mma(shared.tile_0.rest.index(i), shared.tile_0.right.index(i), acc, is_async=True)
        row_sum = warpgroup_mma_wait(1, deps=[row_sum])  # for the first of both products; their sum is not touched
        _arrive(shared.empty.index(RIGHT_1))
        sums = warpgroup_mma_wait(0, deps=[acc])
        _arrive(shared.empty.index(RIGHT_0))
    _finish(shared, sums, base, row_sum, results, sizes, 1)


@gluon.jit
def _load_queries(shared, results, sizes, OWN: gl.constexpr):
    """Copy half of the columns of the q heads to shared memory, and wait for the other half."""
    head = sizes.first_head + gl.arange(0, ROWS, gl.SliceLayout(1, GATHERED))
    row, inside = head.to(gl.int64) * sizes.q_stride, head < sizes.group_size
    if OWN == 0:
        copy_rows(shared.q.left.index(0), results.p_q, row, inside, 0, GATHERED)
    else:
        copy_rows(shared.q.right.index(0), results.p_q, row, inside, HALF, GATHERED)
        copy_rows(shared.q.rest.index(0), results.p_q, row, inside, WIDE, GATHERED)
    async_copy.mbarrier_arrive(shared.q_ready.index(0), increment_count=False)
    mbarrier.wait(shared.q_ready.index(0), 0)
    fence_async_shared()


@gluon.jit
def _finish(shared, sums, base, row_sum, results, sizes, OWN: gl.constexpr):
    """Write half of the columns of the output, by way of the memory of q; warpgroup 0 writes lse too."""
    dtype: gl.constexpr = shared.q.left.dtype
    _show(shared, row_sum, OWN)
    row_sum += _shown(shared, sizes.turns & 1, OWN)  # the other warpgroup has no more scores to compute
    empty_row = row_sum == 0
    total = gl.where(empty_row, 1.0, row_sum)
    if OWN == 0:
        head = sizes.first_head + gl.arange(0, ROWS, ROW)
        lse = gl.where(empty_row, -float("inf"), base * LN2 + gl.log(total))
        gl.store(results.p_lse + head.to(gl.int64) * sizes.queries, lse, mask=head < sizes.group_size)
        tile = shared.q.left.index(0)
    else:
        tile = shared.q.right.index(0)
    tile.store((sums * gl.convert_layout(1.0 / total, SUMS_ROW)[:, None]).to(dtype))
    head = sizes.first_head + gl.arange(0, ROWS, gl.SliceLayout(1, GATHERED))
    column = OWN * HALF + gl.arange(0, HALF, gl.SliceLayout(0, GATHERED))
    p_rows = results.p_out + head.to(gl.int64)[:, None] * sizes.out_stride + column[None, :]
    gl.store(p_rows, tile.load(GATHERED), mask=(head < sizes.group_size)[:, None])
