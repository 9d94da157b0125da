# SPDX-License-Identifier: Apache-2.0
"""The indexer on a GPU, streaming: all keys are scored for a few queries, and each query keeps its best keys so far.

    a sample of the keys -> a threshold that about 1.3 times `slots` scores should reach
    keys, BLOCK_K at a time -> scores of BLOCK_Q queries -> those above the query's threshold, appended to its list
    a list that could overflow, and each at the end -> its best `slots`, in order; the worst is the new threshold

After the sample the threshold only rises, and later blocks with a score equal to it are not appended. The result is
therefore exact, and of equal scores the earlier block wins. If fewer than `slots` scores reach a sample's threshold,
the tile is processed again without it. Lists stay in ascending order of blocks. A program has the lists of one tile of
queries, so memory does not depend on the numbers of queries and keys.

Legend: T queries, M keys, Hi heads of the indexer, D their width, n slots.
"""

import triton
import triton.language as tl

from dynaxx.kernels.primitives.numbers import ordered_bits
from dynaxx.kernels.primitives.prefetch import prefetched
from dynaxx.kernels.runtime.launcher import kernel_launcher

SPARE = tl.constexpr(4)  # tiles of keys: a list with less room is shrunk
SAMPLED_BITS = tl.constexpr(20)  # bits of a sample's threshold that are determined


@triton.jit
def _head(p_q, p_weights, row, known, i_head, heads, o_d, D: tl.constexpr):
    """Return q [BLOCK_Q, BLOCK_D] and weights [BLOCK_Q] of a head."""
    at = row * heads + i_head
    q = tl.load(p_q + at[:, None] * D + o_d[None, :], mask=known[:, None] & (o_d < D)[None, :], other=0.0)
    return q, tl.load(p_weights + at, mask=known, other=0.0)


@triton.jit
def _few_heads(p_q, p_weights, row, known, heads, o_d, D: tl.constexpr, HEADS: tl.constexpr):
    """Return q and weights of up to four heads, which stay in registers for all keys; placeholders if HEADS is 0."""
    first = _head(p_q, p_weights, row, known, 0, heads, o_d, D)
    second, third, fourth = first, first, first
    if HEADS > 1:
        second = _head(p_q, p_weights, row, known, 1, heads, o_d, D)
    if HEADS > 2:
        third = _head(p_q, p_weights, row, known, 2, heads, o_d, D)
    if HEADS > 3:
        fourth = _head(p_q, p_weights, row, known, 3, heads, o_d, D)
    return first, second, third, fourth


@triton.jit
def _add_head(total, head, k):
    """Return total [BLOCK_Q, BLOCK_K] with weight * relu(q . k) of a head added."""
    q, weight = head
    if q.dtype == tl.int8:
        products = tl.dot(q, tl.trans(k)).to(tl.float32)
    else:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    return total + tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]


@triton.jit
def index_scores(
    held, p_q, p_k, p_weights, p_k_scale, row, known, key, inside, heads, o_d,
    D: tl.constexpr, HEADS: tl.constexpr, SCALED: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Return scores of queries `row` [BLOCK_Q] for keys `key` [BLOCK_K], in fp32, by the heads held or by all."""
    k = tl.load(p_k + key[:, None] * D + o_d[None, :], mask=inside[:, None] & (o_d < D)[None, :], other=0.0)
    if PREFETCH:
        k = prefetched(k, PREFETCH)
    total = tl.zeros([row.shape[0], key.shape[0]], tl.float32)
    if HEADS:
        total = _add_head(total, held[0], k)
        if HEADS > 1:
            total = _add_head(total, held[1], k)
        if HEADS > 2:
            total = _add_head(total, held[2], k)
        if HEADS > 3:
            total = _add_head(total, held[3], k)
    else:
        for i_head in range(heads):
            total = _add_head(total, _head(p_q, p_weights, row, known, i_head, heads, o_d, D), k)
    if SCALED:
        total = total * tl.load(p_k_scale + key, mask=inside, other=0.0)[None, :]
    return total + 0.0  # no -0


@triton.jit
def block_scores(scores, key, inside, position, GRAIN: tl.constexpr, ALL: tl.constexpr = False):
    """Return ordered bits of the best visible key of each block, and which blocks are visible, [BLOCK_Q, blocks].

    ALL: whether every key is visible to every query.
    """
    bits = ordered_bits(scores)
    visible = tl.full([scores.shape[0], scores.shape[1]], True, tl.int1)
    if not ALL:
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        bits = tl.where(visible, bits, 0)
    if GRAIN > 1:
        shape: tl.constexpr = [scores.shape[0], scores.shape[1] // GRAIN, GRAIN]
        bits = tl.max(tl.reshape(bits, shape), 2)
        visible = tl.max(tl.reshape(visible.to(tl.int32), shape), 2) != 0
    return bits, visible


@triton.jit
def _nth_best(bits, wanted, BITS: tl.constexpr):
    """Return the largest x, exact to BITS bits, such that at least `wanted` of `bits` are >= x.

    Return early once exactly `wanted` numbers are >= x, because these are the best.
    """
    best = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x80000000, tl.uint32)
    turns = 0
    while turns < BITS:
        reached = tl.sum((bits >= (best | step)).to(tl.int32), 0)
        best = tl.where(reached >= wanted, best | step, best)
        step = step >> 1
        turns = tl.where(reached == wanted, BITS, turns + 1)
    return best


@triton.jit
def _keep_best(p_list, count, slots, CAPACITY: tl.constexpr):
    """Shorten a list of `count` entries to its best `slots`, in order; return their number and the new threshold."""
    o_c = tl.arange(0, CAPACITY)
    there = o_c < count
    entry = tl.load(p_list + o_c, mask=there, other=0)
    bits = (entry >> 32).to(tl.uint32)
    worst = _nth_best(bits, slots, 32)
    better = there & (bits > worst)
    equal = there & (bits == worst)
    room = slots - tl.sum(better.to(tl.int32), 0)
    kept = better | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(p_list + place, entry, mask=kept)
    return tl.sum(kept.to(tl.int32), 0), worst


@triton.jit
def _keep_best_of_tile(p_lists, counts, thresholds, slots, BLOCK_Q: tl.constexpr, CAPACITY: tl.constexpr):
    """Shorten the lists of a tile that have more than `slots` entries; return counts and thresholds."""
    o_q = tl.arange(0, BLOCK_Q)
    tl.debug_barrier()
    for i_row in range(BLOCK_Q):
        count = tl.sum(tl.where(o_q == i_row, counts, 0), 0)
        if count > slots:
            kept, worst = _keep_best(p_lists + i_row * CAPACITY, count, slots, CAPACITY)
            counts = tl.where(o_q == i_row, kept, counts)
            thresholds = tl.where(o_q == i_row, worst, thresholds)
    tl.debug_barrier()
    return counts, thresholds


@triton.jit
def _sampled_thresholds(
    held, p_q, p_k, p_weights, p_k_scale, p_lists, row, known, first_key, seen, slots, heads, o_d,
    D: tl.constexpr, HEADS: tl.constexpr, SCALED: tl.constexpr, GRAIN: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, CAPACITY: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Return thresholds [BLOCK_Q] that somewhat more than `slots` of the `seen` first keys should exceed.

    The sample is SAMPLES tiles of keys at equal distances. Of n blocks in it, k * n / all should be among the best k;
    the threshold is a rank behind that by 4 standard deviations.
    """
    BLOCKS: tl.constexpr = BLOCK_K // GRAIN
    o_q, o_k = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    distance = seen // BLOCK_K // SAMPLES * BLOCK_K
    for i_sample in range(SAMPLES):
        key = i_sample * distance + o_k
        scores = index_scores(
            held, p_q, p_k, p_weights, p_k_scale, row, known, first_key + key, key < seen, heads, o_d,
            D, HEADS, SCALED, 1 if HEADS else 0,
        )  # fmt: skip
        bits, _ = block_scores(scores, key, key < seen, tl.zeros([BLOCK_Q], tl.int32) + seen, GRAIN)
        at = (o_q * CAPACITY)[:, None] + i_sample * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        tl.store(p_lists + at, bits.to(tl.int64))
    tl.debug_barrier()
    expected = slots * (SAMPLES * BLOCKS * GRAIN / seen.to(tl.float32))
    rank = (expected + 4 * tl.sqrt(expected) + 4).to(tl.int32)
    thresholds = tl.zeros([BLOCK_Q], tl.uint32)
    o_s = tl.arange(0, SAMPLES * BLOCKS)
    for i_row in range(BLOCK_Q):
        bits = tl.load(p_lists + i_row * CAPACITY + o_s).to(tl.uint32)
        reached = _nth_best(bits, rank, SAMPLED_BITS)
        thresholds = tl.where(o_q == i_row, tl.where(reached == 0, reached, reached - 1), thresholds)
    tl.debug_barrier()
    return tl.where(known, thresholds, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _append(p_lists, counts, thresholds, bits, visible, first_block, CAPACITY: tl.constexpr):
    """Append the blocks of a tile of keys that exceed the thresholds; return counts."""
    o_q = tl.arange(0, bits.shape[0])
    taken = (visible & (bits > thresholds[:, None])).to(tl.int32)
    at = (o_q * CAPACITY + counts)[:, None] + tl.cumsum(taken, 1) - 1
    block = (first_block + tl.arange(0, bits.shape[1])).to(tl.uint32).to(tl.int64)  # no sign to spread
    tl.store(p_lists + at, (bits.to(tl.int64) << 32) | block[None, :], mask=taken != 0)
    return counts + tl.sum(taken, 1)


@kernel_launcher
@triton.jit(do_not_specialize=["tiles", "heads", "slots"])
def _index_tokens_kernel(
    p_q,  # (T, Hi, D) contiguous
    p_k,  # (M, D) contiguous
    p_weights,  # (T, Hi) fp32
    p_k_scale,  # (M,) fp32, if SCALED
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    p_lists,  # (programs, BLOCK_Q, CAPACITY) int64: bits of a score, then the block
    p_chosen,  # (T, n) int32
    tiles,
    heads,
    slots,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,  # heads that stay resident; 0: any number of heads, loaded for each tile of keys
    GRAIN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,  # tiles of keys in the sample
    BLOCK_S: tl.constexpr,
    SCALED: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    BLOCKS: tl.constexpr = BLOCK_K // GRAIN  # blocks per tile of keys
    i_program = tl.program_id(0).to(tl.int64)
    p_lists += i_program * (BLOCK_Q * CAPACITY)
    o_q, o_k, o_d, o_s = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    for i_turn in range(i_program, tiles, tl.num_programs(0)):
        i_tile = tiles - 1 - i_turn  # the last queries, which see the most, come first
        first_query, queries_here = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
        known = o_q < queries_here
        row = (first_query + o_q).to(tl.int64)
        position = tl.load(p_position + row, mask=known, other=-1)
        first_key = tl.load(p_first_key + first_query).to(tl.int64)
        last = tl.max(position, 0)
        seen = tl.maximum(tl.load(p_position + first_query) + 1, 0)  # keys that all queries of the tile see
        held = _few_heads(p_q, p_weights, row, known, heads, o_d, D, HEADS)
        lowest = tl.where(known, 0, 0xFFFFFFFF).to(tl.uint32)
        thresholds = lowest
        sampled = (seen > 4 * tl.maximum(slots * GRAIN, SAMPLES * BLOCK_K)).to(tl.int32)
        if sampled:
            thresholds = _sampled_thresholds(
                held, p_q, p_k, p_weights, p_k_scale, p_lists, row, known, first_key, seen, slots, heads, o_d,
                D, HEADS, SCALED, GRAIN, BLOCK_Q, BLOCK_K, CAPACITY, SAMPLES,
            )  # fmt: skip
        counts = tl.zeros([BLOCK_Q], tl.int32)
        begin = 0
        while begin <= last:
            fits = (CAPACITY - tl.max(counts, 0)) // BLOCKS  # tiles of keys, whatever they contain
            end = tl.minimum(last + 1, begin + fits * BLOCK_K)
            inner = tl.minimum(end, tl.maximum(begin, seen // BLOCK_K * BLOCK_K))
            for first in range(begin, inner, BLOCK_K):
                key = first + o_k
                scores = index_scores(
                    held, p_q, p_k, p_weights, p_k_scale, row, known, first_key + key, key >= 0, heads, o_d,
                    D, HEADS, SCALED, PREFETCH,
                )  # fmt: skip
                bits, visible = block_scores(scores, key, key >= 0, position, GRAIN, True)
                counts = _append(p_lists, counts, thresholds, bits, visible, first // GRAIN, CAPACITY)
            for first in range(inner, end, BLOCK_K):
                key = first + o_k
                scores = index_scores(
                    held, p_q, p_k, p_weights, p_k_scale, row, known, first_key + key, key <= last, heads, o_d,
                    D, HEADS, SCALED, 0,
                )  # fmt: skip
                bits, visible = block_scores(scores, key, key <= last, position, GRAIN)
                counts = _append(p_lists, counts, thresholds, bits, visible, first // GRAIN, CAPACITY)
            begin = end
            if tl.max(counts, 0) > CAPACITY - SPARE * BLOCKS or begin > last:
                counts, thresholds = _keep_best_of_tile(p_lists, counts, thresholds, slots, BLOCK_Q, CAPACITY)
                misled = (sampled != 0) & (begin > last) & (tl.min(tl.where(known, counts, slots), 0) < slots)
                if misled:  # once more, without thresholds of the sample
                    sampled = 0
                    begin = 0
                    counts = tl.zeros([BLOCK_Q], tl.int32)
                    thresholds = lowest
        for i_row in range(queries_here):
            count = tl.sum(tl.where(o_q == i_row, counts, 0), 0)
            p_row = p_chosen + (first_query + i_row).to(tl.int64) * slots
            for start in range(0, slots, BLOCK_S):
                at = start + o_s
                block = tl.load(p_lists + i_row * CAPACITY + at, mask=at < count, other=-1)
                tl.store(p_row + at, block.to(tl.int32), mask=at < slots)
        tl.debug_barrier()


@kernel_launcher
@triton.jit(do_not_specialize=["heads", "columns", "first_tile"])
def _index_scores_kernel(
    p_q,
    p_k,
    p_weights,
    p_k_scale,
    p_tiles,
    p_position,
    p_first_key,
    p_scores,  # (queries of the launch, columns) int64: bits of a block's score, then how early it comes; -1 hidden
    heads,
    columns,  # blocks of the longest sequence
    first_tile,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write the scores of a few queries for all keys, as numbers whose order is that of choices."""
    i_tile = tl.program_id(0) + first_tile
    o_q, o_d, first = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_K
    first_query, queries_here = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
    known = o_q < queries_here
    row = (first_query + o_q).to(tl.int64)
    position = tl.load(p_position + row, mask=known, other=-1)
    first_key, last = tl.load(p_first_key + first_query).to(tl.int64), tl.max(position, 0)
    key = first + tl.arange(0, BLOCK_K)
    scores = index_scores(
        None, p_q, p_k, p_weights, p_k_scale, row, known, first_key + key, key <= last, heads, o_d,
        D, 0, SCALED, 0,
    )  # fmt: skip
    bits, visible = block_scores(scores, key, key <= last, position, GRAIN)
    block = first // GRAIN + tl.arange(0, BLOCK_K // GRAIN)
    order = (bits.to(tl.int64) << 31) | (0x7FFFFFFF - block).to(tl.int64)[None, :]
    start = tl.load(p_tiles + 2 * first_tile).to(tl.int64)
    p_row = p_scores + ((row - start) * columns)[:, None] + block[None, :]
    tl.store(p_row, tl.where(visible, order, -1), mask=known[:, None] & (block < columns)[None, :])
