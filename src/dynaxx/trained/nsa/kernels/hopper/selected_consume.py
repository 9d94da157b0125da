# SPDX-License-Identifier: Apache-2.0
"""Consumer warpgroup of selected attention by query: 64 rows of a tile.

    window (if WINDOWED) -> swa, kept in shared memory;  own blocks of the union -> out, lse;  gated sum -> mixed

It attends to the tile's window first, if requested, and then to the blocks that its own positions selected. When it
writes the result, it adds the branches, weighted by their gates.

In bf16, which has the range of fp32, weights are relative to the largest score of the first block that a row sees,
without further maxima. Once a row is done, its sum tells whether a weight was too large. The tile of such a row is
marked, and a second launch computes it again with the maxima of every block, which fp16 uses from the start.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.attention.hopper.forward_consume import LARGEST, LN2, ROWS, SMALLEST
from dynaxx.kernels.compat import tma_store
from dynaxx.kernels.primitives.hopper.signals import receive_number
from dynaxx.kernels.primitives.hopper.visible import WORD_LAYOUT
from dynaxx.trained.nsa.kernels.hopper.selected_tiles import (
    ANY_LOST,
    LOST,
    places,
    product_layout,
    row_tile,
    sequence_start,
    window_of,
)


@gluon.jit
def _scores(q, k, layout: gl.constexpr):
    """Return scores [ROWS, KV_BLOCK] in fp32."""
    KV_BLOCK: gl.constexpr = k.shape[0]
    zero = gl.zeros([ROWS, KV_BLOCK], gl.float32, layout)
    token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[token])


@gluon.jit
def _raised(sums, scores, selected, scale_log2):
    """Return a row's state relative to its largest score, including the scores of one more block.

    The state is the base, each thread's sum of weights, and the sums of values. If `selected` is not None, rows that
    did not select the block see nothing of it.
    """
    base, row_sum, acc = sums
    best = gl.max(scores, 1) * scale_log2
    if selected is not None:
        best = gl.where(selected, best, -float("inf"))
    best = gl.maximum(base, best)
    rescale = gl.exp2(base - gl.where(best == -float("inf"), 0.0, best))
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return best, row_sum, acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _add_block(sums, scores, v, selected, scale_log2, CHECKED: gl.constexpr):
    """Return `sums` plus a block, with weights relative to the same bases; weights are 0 if a row has seen nothing."""
    base, row_sum, acc = sums
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    shift = gl.where(base == -float("inf"), 0.0, base)
    if not CHECKED:
        base = shift if selected is None else gl.where(selected, shift, base)
    if selected is not None:
        shift = gl.where(selected, shift, float("inf"))
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    # thread t of a row has columns 2 t and 2 t + 1 of every eight
    part = gl.sum(gl.sum(gl.reshape(weights, [ROWS, weights.shape[1] // 8, 4, 2]), 3), 1)
    p = gl.convert_layout(weights.to(v.dtype), p_layout)
    token = warpgroup_mma(p, v, acc, is_async=True)
    row_sum += gl.convert_layout(part, row_sum.type.layout)
    acc = warpgroup_mma_wait(0, deps=[token])
    return base, row_sum, acc


@gluon.jit
def _result(sums, p_state, i_tile, inside, CHECKED: gl.constexpr):
    """Return out and lse; mark the tile if weights of a row `inside` left their range."""
    base, row_sum, acc = sums
    layout: gl.constexpr = base.type.layout
    total = gl.convert_layout(gl.sum(row_sum, 1), layout)
    if not CHECKED:
        kept = (total < LARGEST) & ((total > SMALLEST) | (base != 0))
        mark = p_state + gl.zeros([ROWS], gl.int32, layout)
        gl.store(mark + ANY_LOST, 1, mask=inside & ~kept)
        gl.store(mark + (LOST + i_tile), 1, mask=inside & ~kept)
    hidden = total == 0
    total = gl.where(hidden, 1.0, total)
    lse = gl.where(hidden, -float("inf"), (base + gl.log2(total)) * LN2)
    return acc / gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None], lse


@gluon.jit
def consume(
    rows, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, POSITIONS: gl.constexpr, GROUP: gl.constexpr,
    KV_BLOCK: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, ALONE: gl.constexpr, MIXED: gl.constexpr,
    WINDOWED: gl.constexpr, CHECKED: gl.constexpr,
):  # fmt: skip
    """Compute this consumer's rows of every tile that its program processes."""
    (
        out_desc, swa_desc, mixed_desc, q_buffers, w_buffers, k_buffers, v_buffers, numbers, q_full, q_empty, full,
        empty, p_lse, p_swa_lse, p_last_key, p_first_block, p_block_start, p_starts, p_members, p_counts, p_gates,
        p_state, window, queries, heads, scale_log2,
    ) = rows  # fmt: skip
    D: gl.constexpr = out_desc.block_type.shape[2]
    EVERY: gl.constexpr = (1 << POSITIONS) - 1
    s_layout: gl.constexpr = product_layout(KV_BLOCK)
    acc_layout: gl.constexpr = product_layout(D)
    position, member, columns = places(s_layout, GROUP)
    q = q_buffers.index(CONSUMER).reshape([ROWS, D])
    turn, done = 0, 0
    mbarrier.wait(q_full.index(0), 0)
    i_tile = receive_number(numbers, 0)
    while i_tile >= 0:
        i_head, tile_t = i_tile % heads, i_tile // heads * (CONSUMERS * POSITIONS)
        count = gl.load(p_counts + i_tile)
        first_t = tile_t + CONSUMER * POSITIONS
        t = first_t + position
        h = i_head * GROUP + member
        last_key = gl.load(p_last_key + t, mask=t < queries, other=-1)
        nearest = gl.min(last_key, 0)
        at = [first_t, i_head * GROUP, 0]
        none = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
        zero = gl.zeros([ROWS, 4], gl.float32, WORD_LAYOUT)
        nothing = gl.zeros([ROWS, D], gl.float32, acc_layout)
        if WINDOWED:
            begin, window_count = window_of(
                p_last_key, p_first_block, p_block_start, tile_t, CONSUMERS * POSITIONS, queries, window, KV_BLOCK
            )
            first_key = gl.maximum(sequence_start(p_first_block, p_block_start, t, t < queries), last_key - window + 1)
            first_key = gl.where(t < queries, first_key, 0x7FFFFFFF)
            seen_from, all_from, seen_to = gl.min(first_key, 0), gl.max(first_key, 0), gl.max(last_key, 0)
            sums = none, zero, nothing
            fresh = True
            for i_block in range(window_count):
                start = begin + i_block * KV_BLOCK
                stage = (done + i_block) % STAGES
                mbarrier.wait(full.index(stage), ((done + i_block) // STAGES) & 1)
                if (start <= seen_to) & (start + KV_BLOCK > seen_from):
                    scores = _scores(q, k_buffers.index(stage).reshape([KV_BLOCK, D]), s_layout)
                    if (start < all_from) | (start + KV_BLOCK - 1 > nearest):
                        seen = (columns[None, :] >= (first_key - start)[:, None]) & (
                            columns[None, :] <= (last_key - start)[:, None]
                        )
                        scores = gl.where(seen, scores, -float("inf"))
                    if CHECKED or fresh:
                        sums = _raised(sums, scores, None, scale_log2)
                        fresh = False
                    v = v_buffers.index(stage).reshape([KV_BLOCK, D])
                    sums = _add_block(sums, scores, v, None, scale_log2, CHECKED)
                mbarrier.arrive(empty.index(stage), count=1)
            done += window_count
            swa, swa_lse = _result(sums, p_state, i_tile, (t < queries) & (first_key <= last_key), CHECKED)
            w_buffers.index(CONSUMER).reshape([ROWS, D]).store(swa.to(out_desc.dtype))
            if ALONE:
                gl.store(p_swa_lse + h.to(gl.int64) * queries + t, swa_lse, mask=t < queries)
                fence_async_shared()
                tma_store(swa_desc, at, w_buffers.index(CONSUMER))
        sums = none, zero, nothing
        fresh = EVERY  # positions that have not seen any block yet
        p_own_starts = p_starts + i_tile.to(gl.int64) * SLOTS
        p_own_members = p_members + i_tile.to(gl.int64) * SLOTS
        next_members, next_start = gl.load(p_own_members), gl.load(p_own_starts)
        for i_slot in range(count):
            members, start = (next_members >> (CONSUMER * POSITIONS)) & EVERY, next_start
            ahead = gl.minimum(i_slot + 1, count - 1)
            next_members, next_start = gl.load(p_own_members + ahead), gl.load(p_own_starts + ahead)
            stage = (done + i_slot) % STAGES
            mbarrier.wait(full.index(stage), ((done + i_slot) // STAGES) & 1)
            if members != 0:
                scores = _scores(q, k_buffers.index(stage).reshape([KV_BLOCK, D]), s_layout)
                if start + KV_BLOCK - 1 > nearest:
                    scores = gl.where(columns[None, :] <= (last_key - start)[:, None], scores, -float("inf"))
                selected = ((members >> position) & 1) != 0
                if CHECKED or (fresh & members) != 0:
                    sums = _raised(sums, scores, selected, scale_log2)
                    fresh &= ~members
                v = v_buffers.index(stage).reshape([KV_BLOCK, D])
                sums = _add_block(sums, scores, v, selected, scale_log2, CHECKED)
            mbarrier.arrive(empty.index(stage), count=1)
        done += count
        if not ALONE:
            mbarrier.arrive(q_empty.index(0), count=1)
        acc, lse = _result(sums, p_state, i_tile, t < queries, CHECKED)
        gl.store(p_lse + h.to(gl.int64) * queries + t, lse, mask=t < queries)
        if ALONE:
            q.store(acc.to(out_desc.dtype))  # q is not read again, so its buffer can hold the result
            fence_async_shared()
            tma_store(out_desc, at, q_buffers.index(CONSUMER))
        if MIXED:
            p_row = p_gates + (t.to(gl.int64) * (heads * GROUP) + h) * 3
            stage = (done + CONSUMER) % STAGES
            acc *= _gate(p_row + 1, t < queries, acc_layout)
            if WINDOWED:
                swa = w_buffers.index(CONSUMER).reshape([ROWS, D]).load(acc_layout)
                acc += swa.to(gl.float32) * _gate(p_row + 2, t < queries, acc_layout)
            mbarrier.wait(full.index(stage), ((done + CONSUMER) // STAGES) & 1)
            cmp = row_tile(k_buffers, out_desc, stage)
            acc += cmp.reshape([ROWS, D]).load(acc_layout).to(gl.float32) * _gate(p_row, t < queries, acc_layout)
            if not WINDOWED:
                swa = row_tile(v_buffers, out_desc, stage).reshape([ROWS, D]).load(acc_layout)
                acc += swa.to(gl.float32) * _gate(p_row + 2, t < queries, acc_layout)
            cmp.reshape([ROWS, D]).store(acc.to(out_desc.dtype))
            fence_async_shared()
            tma_store(mixed_desc, at, cmp)
        tma.store_wait(0)
        if ALONE:
            mbarrier.arrive(q_empty.index(0), count=1)
        if MIXED:
            for u in gl.static_range(CONSUMERS):  # those of the other consumers as well, once they have arrived
                stage = (done + u) % STAGES
                mbarrier.wait(full.index(stage), ((done + u) // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
            done += CONSUMERS
        turn += 1
        mbarrier.wait(q_full.index(0), turn & 1)
        i_tile = receive_number(numbers, 0)


@gluon.jit
def _gate(p_gates, inside, layout: gl.constexpr):
    """Load gates as [ROWS, 1] fp32."""
    gate = gl.load(p_gates, mask=inside, other=0.0).to(gl.float32)
    return gl.convert_layout(gate, gl.SliceLayout(1, layout))[:, None]
