# SPDX-License-Identifier: Apache-2.0
"""Lists of the best keys of a tile of queries on Hopper, whatever computes the scores.

`triton/indexer.py` describes the method. A kernel hands over three functions, which `best_of_tile` calls:

    start(stream) -> first                             load the first keys; return the first product of their tile
    score(stream, i_key, first) -> scores, running     finish the scores of a tile of keys, start the next one's product
    append(p_lists, counts, scores, thresholds, position, key, CAPACITY, MASKED) -> counts
                                                       append scores that are not <= their query's threshold to its
                                                       list; MASKED: only of keys, from `key` on, up to its position

A stream is (source, first row of k, distance between tiles of keys, loads before, tiles of keys); only the kernel reads
its source. `running` is a product in flight. Scores are [queries, keys] or [keys, queries], as QUERY_AXIS says.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from dynaxx.kernels.compat import barrier, tma_load

KEYS = gl.constexpr(64)  # keys per tile
WARPS = 4
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
def add(a, b):
    """Return a + b, for scans."""
    return a + b


@gluon.jit
def load_keys(k_desc, k_buffers, full, key, i_load):
    """Start loading keys from row `key` on into the buffer of the program's `i_load`-th load."""
    stage = i_load % k_buffers.shape[0]
    mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
    tma_load(k_desc, [key, 0], full.index(stage), k_buffers.index(stage))


@gluon.jit
def nth_best(bits, there, count, wanted, slack):
    """Return the largest x such that at least `wanted` of the `count` numbers `bits` that are `there` are >= x.

    Return early, with a smaller x, once at most `slack` more than `wanted` are >= x. The probes alternate between the
    x that `wanted` would have if numbers were spread evenly, and the middle.
    """
    low = gl.min(gl.where(there, bits, 0xFFFFFFFF), 0)
    high = gl.max(gl.where(there, bits, 0), 0)
    among_low, beyond_high = count, count * 0  # how many are >= low, and how many > high
    turns = 0
    while (among_low > wanted + slack) & (low < high):
        span = high - low
        share = (among_low - wanted).to(gl.float32) / (among_low - beyond_high).to(gl.float32)
        even = (span.to(gl.float32) * share).to(gl.uint32)
        step = gl.where(turns % 2 == 0, even, span >> 1)
        probe = low + gl.minimum(gl.maximum(step, 1), span)
        reached = gl.sum((there & (bits >= probe)).to(gl.int32), 0)
        enough = reached >= wanted
        low = gl.where(enough, probe, low)
        among_low = gl.where(enough, reached, among_low)
        high = gl.where(enough, high, probe - 1)
        beyond_high = gl.where(enough, beyond_high, reached)
        turns += 1
    return low


@gluon.jit
def _keep_best(p_list, p_chosen, count, slots, CAPACITY: gl.constexpr, LAST: gl.constexpr):
    """Shorten a list of `count` entries to its best `slots`, in order; return their number and the new threshold.

    LAST: write their keys to `p_chosen` instead, followed by -1.
    """
    place = gl.arange(0, CAPACITY, _list_layout(CAPACITY))
    there = place < count
    entry = gl.load(p_list + place, mask=place < (count + 15) // 16 * 16, other=0)  # 16: so that loads are wide
    bits = ordered((entry >> 32).to(gl.int32))
    worst = (count * 0).to(gl.uint32)
    kept = there
    if count > slots:
        worst = nth_best(bits, there, count, slots, 0)
        kept = there & (bits >= worst)
        surplus = gl.sum(kept.to(gl.int32), 0) - slots
        if surplus > 0:  # drop the last ones of those that equal the worst
            equal = there & (bits == worst)
            nth = gl.associative_scan(equal.to(gl.int32), 0, add)
            kept = kept & ((nth <= gl.sum(equal.to(gl.int32), 0) - surplus) | (bits != worst))
    to = gl.associative_scan(kept.to(gl.int32), 0, add) - 1
    kept_count = gl.minimum(count, slots)
    if LAST:
        gl.store(p_chosen + to, entry.to(gl.int32), mask=kept)
        if kept_count < slots:
            gl.store(p_chosen + place, gl.zeros_like(place) - 1, mask=(place >= kept_count) & (place < slots))
    else:
        barrier()
        gl.store(p_list + to, entry, mask=kept)
    return kept_count, worst


@gluon.constexpr_function
def _list_layout(capacity):
    """Return the layout of a list: neighbouring entries in a thread, so that scans are short."""
    return gl.BlockedLayout([min(8, capacity // (32 * WARPS))], [32], [WARPS], [0])


@gluon.jit
def _of_queries(values, QUERY_AXIS: gl.constexpr):
    """Return values of queries, as they are spread over a tile of scores."""
    return values[:, None] if QUERY_AXIS == 0 else values[None, :]


@gluon.jit
def _of_keys(values, QUERY_AXIS: gl.constexpr):
    """Return values of keys, as they are spread over a tile of scores."""
    return values[None, :] if QUERY_AXIS == 0 else values[:, None]


@gluon.jit
def _at(values, o_query, i_query):
    """Return one of the `values` of queries as a scalar."""
    return gl.sum(gl.where(o_query == i_query, values, 0), 0)


@gluon.jit
def _sampled_thresholds(
    stream, start: gl.constexpr, score: gl.constexpr, p_lists, o_query, o_key, seen, slots,
    QUERY_AXIS: gl.constexpr, CAPACITY: gl.constexpr, SAMPLES: gl.constexpr,
):  # fmt: skip
    """Return thresholds of each query that somewhat more than `slots` of the `seen` first keys should exceed.

    The sample is SAMPLES tiles of keys at equal distances. Of n keys in it, slots * n / seen should be among the best;
    the threshold is a rank behind that by 4 standard deviations.
    """
    p_samples = p_lists.to(gl.pointer_type(gl.uint32))  # 2 * CAPACITY per query
    first = start(stream)
    for i_sample in range(SAMPLES):
        scores, running = score(stream, i_sample, first)
        at = _of_queries(o_query * (2 * CAPACITY) + i_sample * KEYS, QUERY_AXIS) + _of_keys(o_key, QUERY_AXIS)
        gl.store(p_samples + at, ordered(scores.to(gl.int32, bitcast=True)))
        first = warpgroup_mma_wait(0, deps=[running])
    barrier()
    expected = slots * (SAMPLES * KEYS / seen.to(gl.float32))
    rank = (expected + 4 * gl.sqrt(expected) + 4).to(gl.int32)
    thresholds = gl.full([o_query.shape[0]], float("nan"), gl.float32, o_query.type.layout)
    place = gl.arange(0, SAMPLES * KEYS, _list_layout(SAMPLES * KEYS))
    for i_query in range(o_query.shape[0]):
        bits = gl.load(p_samples + i_query * (2 * CAPACITY) + place)
        reached = nth_best(bits, place >= 0, SAMPLES * KEYS + rank * 0, rank, rank // 16)
        below = gl.where(reached == 0, float("nan"), number(gl.where(reached == 0, reached, reached - 1)))
        thresholds = gl.where(o_query == i_query, below, thresholds)
    barrier()
    return thresholds


@gluon.jit
def best_of_tile(
    source,
    start: gl.constexpr,  # functions; see the top of the file
    score: gl.constexpr,
    append: gl.constexpr,
    p_lists,  # (queries, CAPACITY) int64: bits of a score, then the key
    p_chosen,  # (queries, slots) int32
    o_query,  # numbers of the tile's queries
    o_key,  # numbers of a tile's keys, in the order of its scores
    position,  # position of each query among the keys; -1 for none
    queries_here,
    first_row,  # row of k with the first key of the queries' sequence
    seen,  # how many keys all queries of the tile see
    last,  # the last key that any of them sees
    slots,
    loaded,  # tiles of keys so far
    QUERY_AXIS: gl.constexpr,  # axis of the scores that queries lie along
    CAPACITY: gl.constexpr,
    SAMPLES: gl.constexpr,  # tiles of keys in the sample
):
    """Write the best keys of each query of a tile to `p_chosen`; return how many tiles of keys were loaded so far."""
    known = o_query < queries_here
    nothing = gl.where(known, float("nan"), float("inf"))  # every score passes NaN, none passes inf
    thresholds = nothing
    sampled = (seen > 4 * gl.maximum(slots, SAMPLES * KEYS)).to(gl.int32)
    if sampled != 0:
        stream = source, first_row, seen // KEYS // SAMPLES * KEYS, loaded, SAMPLES
        thresholds = _sampled_thresholds(
            stream, start, score, p_lists, o_query, o_key, seen, slots, QUERY_AXIS, CAPACITY, SAMPLES
        )
        thresholds = gl.where(known, thresholds, float("inf"))
        loaded += SAMPLES
    counts = gl.zeros_like(o_query)
    begin = 0
    while begin <= last:
        fits = (CAPACITY - gl.max(counts, 0)) // KEYS  # tiles of keys, whatever they contain
        end = gl.minimum(last + 1, begin + fits * KEYS)
        turns = gl.cdiv(end - begin, KEYS)
        shared = gl.minimum(turns, gl.maximum(seen - begin, 0) // KEYS)  # tiles that all queries see whole
        stream = source, first_row + begin, KEYS, loaded, turns
        first = start(stream)
        for MASKED in gl.static_range(2):
            for i_key in range(shared if MASKED else 0, turns if MASKED else shared):
                key = begin + i_key * KEYS
                scores, running = score(stream, i_key, first)
                counts = append(p_lists, counts, scores, thresholds, position, key, CAPACITY, MASKED)
                first = warpgroup_mma_wait(0, deps=[running])
        loaded += turns
        begin = end
        if (gl.max(counts, 0) > CAPACITY - SPARE * KEYS) & (begin <= last):
            barrier()
            for i_query in range(o_query.shape[0]):
                count = _at(counts, o_query, i_query)
                if count > slots:
                    kept, worst = _keep_best(p_lists + i_query * CAPACITY, p_chosen, count, slots, CAPACITY, False)
                    counts = gl.where(o_query == i_query, kept, counts)
                    thresholds = gl.where(o_query == i_query, number(worst), thresholds)
            barrier()
        misled = (sampled != 0) & (begin > last) & (gl.min(gl.where(known, counts, slots), 0) < slots)
        if misled:  # once more, without thresholds of the sample
            sampled = 0
            begin = 0
            counts = gl.zeros_like(o_query)
            thresholds = nothing
    barrier()
    for i_query in range(queries_here):
        count = _at(counts, o_query, i_query)
        _keep_best(p_lists + i_query * CAPACITY, p_chosen + i_query * slots, count, slots, CAPACITY, True)
    barrier()
    return loaded
