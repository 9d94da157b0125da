# SPDX-License-Identifier: Apache-2.0
"""The indexer with up to four heads on Hopper, streaming. `triton/tokens/indexer.py` describes the method.

A program is one warpgroup with the q of 64 queries in shared memory; tiles of 64 keys come by TMA. While one head's
products are weighted and added, the next head's are computed. Where Triton would move scores between layouts to append
them to lists, thread t of a row counts what its own columns 2 t and 2 t + 1 of every eight contain:

    taken                    a bit per score, in the registers of its thread
    counts of eight columns  4 bits each, one number per thread: shifted, added, and exchanged by the row's four threads
    place in the list        entries before + counts of the columns before + what the threads before have of these eight
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.hopper.primitives.signals import barriers

ROWS, KEYS = gl.constexpr(64), gl.constexpr(64)  # queries and keys of a tile
STAGES = gl.constexpr(3)
WARPS = 4
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
LIST = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
SAMPLED_BITS = gl.constexpr(20)  # of a sample's threshold that are determined
SPARE = gl.constexpr(4)  # tiles of keys: a list with less room is shrunk


@gluon.jit
def ordered(bits):
    """Return uint32 numbers in the order of fp32 numbers, given as int32 bits."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(gl.uint32, bitcast=True) ^ 0x80000000


@gluon.jit
def number(ordered):
    """Return the fp32 number of a scalar of `ordered`."""
    bits = (ordered ^ 0x80000000).to(gl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def load_keys(k_desc, k_buffers, full, key, i_load):
    """Start loading keys from row `key` on into the buffer of the program's `i_load`-th load."""
    stage = i_load % k_buffers.shape[0]
    mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [key, 0], full.index(stage), k_buffers.index(stage))


@gluon.jit
def _scores(q_buffers, k_buffers, full, weights, i_load, HEADS: gl.constexpr):
    """Return the scores of a tile of keys [ROWS, KEYS] when its load has arrived."""
    stage = i_load % STAGES
    mbarrier.wait(full.index(stage), (i_load // STAGES) & 1)
    k = k_buffers.index(stage).permute((1, 0))
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    total = zero
    running = warpgroup_mma(q_buffers.index(0), k, zero, use_acc=False, is_async=True)
    for i_head in gl.static_range(HEADS):
        if i_head + 1 < HEADS:
            following = warpgroup_mma(q_buffers.index(i_head + 1), k, zero, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(1, deps=[running])
            running = following
        else:
            products = warpgroup_mma_wait(0, deps=[running])
        positive = gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total += positive * weights[i_head][:, None]
    return total + 0.0  # no -0


@gluon.jit
def _next_scores(stream, i_key, HEADS: gl.constexpr):
    """Return the scores of the `i_key`-th tile of a stream of keys, and start loading another tile."""
    k_desc, q_buffers, k_buffers, full, weights, first_key, loaded, turns = stream
    scores = _scores(q_buffers, k_buffers, full, weights, loaded + i_key, HEADS)
    gl.thread_barrier()  # all warps have read the buffer
    if i_key + STAGES < turns:
        load_keys(k_desc, k_buffers, full, first_key + (i_key + STAGES) * KEYS, loaded + i_key + STAGES)
    return scores


@gluon.jit
def _weights_of_heads(p_rows, known, HEADS: gl.constexpr):
    """Return the weights [ROWS] of four heads; missing heads repeat another."""
    first = gl.load(p_rows, mask=known, other=0.0)
    second = gl.load(p_rows + min(1, HEADS - 1), mask=known, other=0.0)
    third = gl.load(p_rows + min(2, HEADS - 1), mask=known, other=0.0)
    return first, second, third, gl.load(p_rows + (HEADS - 1), mask=known, other=0.0)


@gluon.jit
def _append(p_lists, counts, scores, taken, first_key, CAPACITY: gl.constexpr):
    """Append the taken scores of a tile, with their keys, to the lists of their rows, in order; return counts."""
    by_thread = gl.reshape(taken.to(gl.int32), [ROWS, KEYS // 8, 4, 2])
    layout: gl.constexpr = by_thread.type.layout
    eights: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))  # [ROWS, KEYS // 8]
    i_eight = gl.arange(0, KEYS // 8, gl.SliceLayout(0, eights))
    shifted = by_thread << (4 * i_eight)[None, :, None, None]
    own = gl.sum(gl.sum(shifted, 3), 1)  # [ROWS, 4]
    i_thread = gl.arange(0, 4, gl.SliceLayout(0, own.type.layout))
    before = gl.zeros_like(own)
    for i in gl.static_range(3):
        of_thread = gl.sum(gl.where(i_thread[None, :] == i, own, 0), 1)
        before += gl.where(i_thread[None, :] > i, of_thread[:, None], 0)
    total = gl.convert_layout(gl.sum(own, 1), gl.SliceLayout(1, eights))  # a number of 4 bits per eight columns
    even, odd = total & 0x0F0F0F0F, (total >> 4) & 0x0F0F0F0F
    pairs = (even + odd) * 0x01010101  # bytes: counts up to here
    ahead = pairs << 8
    shift = 8 * (i_eight // 2)
    first = gl.where(
        i_eight[None, :] % 2 == 0, ahead[:, None] >> shift[None, :], (ahead + even)[:, None] >> shift[None, :]
    )
    first = (first & 0xFF) + gl.convert_layout(counts, gl.SliceLayout(1, eights))[:, None]
    triples: gl.constexpr = gl.SliceLayout(3, layout)  # [ROWS, KEYS // 8, 4]
    before = gl.convert_layout(before, gl.SliceLayout(1, triples))
    place = gl.convert_layout(first, gl.SliceLayout(2, triples))[:, :, None]
    place += (
        before[:, None, :]
        >> (4 * gl.arange(0, KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, triples))))[None, :, None]
    ) & 15
    row = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, triples)))
    place += (row * CAPACITY)[:, None, None]
    left, right = gl.split(by_thread)
    left_score, right_score = gl.split(gl.reshape(scores.to(gl.int32, bitcast=True), [ROWS, KEYS // 8, 4, 2]))
    target: gl.constexpr = left.type.layout
    place = gl.convert_layout(place, target)
    i_eight = gl.arange(0, KEYS // 8, gl.SliceLayout(0, gl.SliceLayout(2, target)))
    i_thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, target)))
    key = (first_key + (8 * i_eight)[None, :, None] + (2 * i_thread)[None, None, :]).to(gl.uint32)
    gl.store(p_lists + place, (left_score.to(gl.int64) << 32) | key.to(gl.int64), mask=left != 0)
    gl.store(p_lists + place + left, (right_score.to(gl.int64) << 32) | (key + 1).to(gl.int64), mask=right != 0)
    return counts + gl.convert_layout(pairs >> 24, ROW)


@gluon.jit
def nth_best(bits, wanted, BITS: gl.constexpr):
    """Return the largest x, exact to BITS bits, such that at least `wanted` of `bits` are >= x.

    Return early once exactly `wanted` numbers are >= x, because these are the best.
    """
    best = wanted.to(gl.uint32) * 0
    step = best + 0x80000000
    turns = 0
    while turns < BITS:
        reached = gl.sum((bits >= (best | step)).to(gl.int32), 0)
        best = gl.where(reached >= wanted, best | step, best)
        step = step >> 1
        turns = gl.where(reached == wanted, BITS, turns + 1)
    return best


@gluon.jit
def keep_best(p_list, p_chosen, count, slots, CAPACITY: gl.constexpr, LAST: gl.constexpr):
    """Shorten a list of `count` entries to its best `slots`, in order; return their number and the new threshold.

    LAST: write their keys to `p_chosen` instead, followed by -1.
    """
    place = gl.arange(0, CAPACITY, LIST)
    entry = gl.load(p_list + place, mask=place < count, other=0)
    key = entry.to(gl.int32)
    bits = gl.where(place < count, ordered((entry >> 32).to(gl.int32)), 0)
    worst = (count * 0).to(gl.uint32)
    kept = place < count
    if count > slots:
        worst = nth_best(bits, slots, 32)
        kept = kept & (bits >= worst)
        surplus = gl.sum(kept.to(gl.int32), 0) - slots
        if surplus > 0:  # drop the last ones of those that equal the worst
            equal = (bits == worst) & (place < count)
            nth = gl.associative_scan(equal.to(gl.int32), 0, add)
            kept = kept & ((nth <= gl.sum(equal.to(gl.int32), 0) - surplus) | (bits != worst))
    to = gl.associative_scan(kept.to(gl.int32), 0, add) - 1
    kept_count = gl.minimum(count, slots)
    if LAST:
        gl.store(p_chosen + to, key, mask=kept)
        for first in range(0, slots, CAPACITY):
            gl.store(
                p_chosen + first + place,
                gl.zeros_like(place) - 1,
                mask=(first + place >= kept_count) & (first + place < slots),
            )
    else:
        gl.thread_barrier()
        gl.store(p_list + to, entry, mask=kept)
    return kept_count, worst


@gluon.jit
def add(a, b):
    """Return a + b, for scans."""
    return a + b


@gluon.jit
def _at(values, i_row):
    """Return one of `values` [ROWS] as a scalar."""
    o_row = gl.arange(0, ROWS, ROW)
    return gl.sum(gl.where(o_row == i_row, values, 0), 0)


@gluon.jit
def _sampled_thresholds(
    k_desc, q_buffers, k_buffers, full, weights, p_lists, first_key, seen, slots, loaded,
    HEADS: gl.constexpr, CAPACITY: gl.constexpr, SAMPLES: gl.constexpr,
):  # fmt: skip
    """Return thresholds [ROWS] that somewhat more than `slots` of the `seen` first keys should exceed.

    The sample is SAMPLES tiles of keys at equal distances. Of n keys in it, slots * n / seen should be among the best;
    the threshold is a rank behind that by 4 standard deviations.
    """
    distance = seen // KEYS // SAMPLES * KEYS
    o_row, o_key = gl.arange(0, ROWS, ROW), gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    for i in gl.static_range(STAGES):
        load_keys(k_desc, k_buffers, full, first_key + i * distance, loaded + i)
    for i_sample in range(SAMPLES):
        scores = _scores(q_buffers, k_buffers, full, weights, loaded + i_sample, HEADS)
        gl.thread_barrier()  # all warps have read the buffer
        if i_sample + STAGES < SAMPLES:
            load_keys(k_desc, k_buffers, full, first_key + (i_sample + STAGES) * distance, loaded + i_sample + STAGES)
        at = (o_row * CAPACITY + i_sample * KEYS)[:, None] + o_key[None, :]
        gl.store(p_lists + at, ordered(scores.to(gl.int32, bitcast=True)).to(gl.int64))
    gl.thread_barrier()
    expected = slots * (SAMPLES * KEYS / seen.to(gl.float32))
    rank = (expected + 4 * gl.sqrt(expected) + 4).to(gl.int32)
    thresholds = gl.full([ROWS], float("nan"), gl.float32, ROW)
    place = gl.arange(0, SAMPLES * KEYS, LIST)
    for i_row in range(ROWS):
        bits = gl.load(p_lists + i_row * CAPACITY + place).to(gl.uint32)
        reached = nth_best(bits, rank, SAMPLED_BITS)
        below = gl.where(reached == 0, float("nan"), number(gl.where(reached == 0, reached, reached - 1)))
        thresholds = gl.where(o_row == i_row, below, thresholds)
    gl.thread_barrier()
    return thresholds


@kernel_launcher
@gluon.jit(do_not_specialize=["tiles", "slots"])
def _index_hopper_kernel(
    p_q,  # (T, HEADS, D) contiguous
    k_desc,  # (M, D), tiles of KEYS rows
    p_weights,  # (T, HEADS) fp32
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    p_lists,  # (programs, ROWS, CAPACITY) int64: bits of a score, then the key
    p_chosen,  # (T, n) int32
    tiles,
    slots,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLES: gl.constexpr,  # tiles of keys in the sample
):
    dtype: gl.constexpr = p_q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [HEADS, ROWS, D], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], k_desc.layout)
    full = barriers(STAGES, 1)
    q_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    o_row = gl.arange(0, ROWS, ROW)
    o_key = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    i_program = gl.program_id(0)
    p_lists += i_program.to(gl.int64) * (ROWS * CAPACITY)
    loaded = 0
    for i_turn in range(i_program, tiles, gl.num_programs(0)):
        i_tile = tiles - 1 - i_turn  # the last queries, which see the most, come first
        first_query, queries_here = gl.load(p_tiles + 2 * i_tile), gl.load(p_tiles + 2 * i_tile + 1)
        first_key = gl.load(p_first_key + first_query)
        seen = gl.maximum(gl.load(p_position + first_query) + 1, 0)  # keys that all queries of the tile see
        last = gl.load(p_position + first_query + queries_here - 1)
        known = o_row < queries_here
        row = (first_query + o_row).to(gl.int64)
        position = gl.load(p_position + row, mask=known, other=-1)
        query = gl.arange(0, ROWS, gl.SliceLayout(1, q_rows))
        o_d = gl.arange(0, D, gl.SliceLayout(0, q_rows))
        p_from = p_q + ((first_query + query).to(gl.int64) * (HEADS * D))[:, None] + o_d[None, :]
        gl.thread_barrier()  # the products of the tile before are done
        for i_head in gl.static_range(HEADS):
            q_buffers.index(i_head).store(gl.load(p_from + i_head * D, mask=(query < queries_here)[:, None], other=0.0))
        weights = _weights_of_heads(p_weights + row * HEADS, known, HEADS)
        fence_async_shared()
        gl.thread_barrier()
        nothing = gl.where(known, float("nan"), float("inf"))  # of unordered numbers, all are taken; of others none
        thresholds = nothing
        sampled = (seen > 4 * gl.maximum(slots, SAMPLES * KEYS)).to(gl.int32)
        if sampled != 0:
            thresholds = _sampled_thresholds(
                k_desc, q_buffers, k_buffers, full, weights, p_lists, first_key, seen, slots, loaded,
                HEADS, CAPACITY, SAMPLES,
            )  # fmt: skip
            thresholds = gl.where(known, thresholds, float("inf"))
            loaded += SAMPLES
        counts = gl.zeros([ROWS], gl.int32, ROW)
        begin = 0
        while begin <= last:
            fits = (CAPACITY - gl.max(counts, 0)) // KEYS  # tiles of keys, whatever they contain
            end = gl.minimum(last + 1, begin + fits * KEYS)
            turns = gl.cdiv(end - begin, KEYS)
            for i in gl.static_range(STAGES):
                if i < turns:
                    load_keys(k_desc, k_buffers, full, first_key + begin + i * KEYS, loaded + i)
            shared = gl.minimum(turns, gl.maximum(seen - begin, 0) // KEYS)  # tiles that all queries see whole
            stream = k_desc, q_buffers, k_buffers, full, weights, first_key + begin, loaded, turns
            for i_key in range(shared):
                scores = _next_scores(stream, i_key, HEADS)
                taken = ~(scores <= thresholds[:, None])
                counts = _append(p_lists, counts, scores, taken, begin + i_key * KEYS, CAPACITY)
            for i_key in range(shared, turns):
                scores = _next_scores(stream, i_key, HEADS)
                visible = begin + i_key * KEYS + o_key[None, :] <= position[:, None]
                taken = visible & ~(scores <= thresholds[:, None])
                counts = _append(p_lists, counts, scores, taken, begin + i_key * KEYS, CAPACITY)
            loaded += turns
            begin = end
            if (gl.max(counts, 0) > CAPACITY - SPARE * KEYS) & (begin <= last):
                gl.thread_barrier()
                for i_row in range(ROWS):
                    count = _at(counts, i_row)
                    if count > slots:
                        kept, worst = keep_best(p_lists + i_row * CAPACITY, p_chosen, count, slots, CAPACITY, False)
                        counts = gl.where(o_row == i_row, kept, counts)
                        thresholds = gl.where(o_row == i_row, number(worst), thresholds)
                gl.thread_barrier()
            misled = (sampled != 0) & (begin > last) & (gl.min(gl.where(known, counts, slots), 0) < slots)
            if misled:  # once more, without thresholds of the sample
                sampled = 0
                begin = 0
                counts = gl.zeros([ROWS], gl.int32, ROW)
                thresholds = nothing
        gl.thread_barrier()
        for i_row in range(queries_here):
            p_own = p_chosen + (first_query + i_row).to(gl.int64) * slots
            keep_best(p_lists + i_row * CAPACITY, p_own, _at(counts, i_row), slots, CAPACITY, True)
        gl.thread_barrier()
