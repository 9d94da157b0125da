# SPDX-License-Identifier: Apache-2.0
"""The indexer with many heads on Hopper, streaming; `indexer.py` serves up to four.

A program is one warpgroup with the q of a few queries times all heads, 256 rows, in shared memory. Tiles of 64 keys
come by TMA and are the rows of products, so that a thread adds its heads in registers:

    k of 64 keys x q of 256 (query, head) -> relu, weighted -> sum over heads: scores of 64 keys for each query
    -> those above the query's threshold, appended to its list by one warp per query
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher
from dynaxx.kernels.hopper.primitives.signals import barriers
from dynaxx.kernels.hopper.tokens.indexer import (
    LIST,
    SAMPLED_BITS,
    SPARE,
    add,
    keep_best,
    load_keys,
    nth_best,
    number,
    ordered,
)

ROWS, KEYS = gl.constexpr(256), gl.constexpr(64)  # queries times heads, and keys, of a tile
WARPS = 4
BY_QUERY = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))  # [KEYS, queries]: a warp has whole queries
QUERY = gl.constexpr(gl.SliceLayout(0, BY_QUERY))


@gluon.jit
def _scores(stream, i_key, HEADS: gl.constexpr, SCALED: gl.constexpr):
    """Return scores [KEYS, queries] of a stream's `i_key`-th tile of keys, and start loading another tile."""
    k_desc, q, k_buffers, full, weights, p_k_scale, first_key, distance, loaded, turns = stream
    BYTES: gl.constexpr = q.dtype.primitive_bitwidth // 8
    STAGES: gl.constexpr = k_buffers.shape[0]
    products_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 // BYTES])
    stage = (loaded + i_key) % STAGES
    scale = 1.0
    if SCALED:
        o_key = gl.arange(0, KEYS, gl.SliceLayout(1, BY_QUERY))
        at = first_key + i_key * distance + o_key
        scale = gl.load(p_k_scale + at, mask=at < k_desc.shape[0], other=0.0)[:, None]
    mbarrier.wait(full.index(stage), ((loaded + i_key) // STAGES) & 1)
    zero = gl.zeros([KEYS, ROWS], gl.float32, products_layout)
    token = warpgroup_mma(k_buffers.index(stage), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[token])
    gl.thread_barrier()  # all warps have read the buffer
    if i_key + STAGES < turns:
        load_keys(k_desc, k_buffers, full, first_key + (i_key + STAGES) * distance, loaded + i_key + STAGES)
    weighted = gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    summed = gl.sum(gl.reshape(weighted, [KEYS, ROWS // HEADS, HEADS]), 2)
    return gl.convert_layout(summed, BY_QUERY) * scale + 0.0  # no -0


@gluon.jit
def _append(p_lists, counts, scores, taken, first_key, CAPACITY: gl.constexpr):
    """Append the taken scores of a tile, with their keys, to the lists of their queries, in order; return counts."""
    one = taken.to(gl.int32)
    query = gl.arange(0, scores.shape[1], QUERY)
    place = (query * CAPACITY + counts)[None, :] + gl.associative_scan(one, 0, add) - 1
    key = (first_key + gl.arange(0, KEYS, gl.SliceLayout(1, BY_QUERY))).to(gl.uint32).to(gl.int64)
    entry = (scores.to(gl.int32, bitcast=True).to(gl.int64) << 32) | key[:, None]
    gl.store(p_lists + place, entry, mask=taken)
    return counts + gl.sum(one, 0)


@gluon.jit
def _begin(stream):
    """Start loading the first tiles of a stream of keys."""
    k_desc, _, k_buffers, full, _, _, first_key, distance, loaded, turns = stream
    STAGES: gl.constexpr = k_buffers.shape[0]
    for i in gl.static_range(STAGES):
        if i < turns:
            load_keys(k_desc, k_buffers, full, first_key + i * distance, loaded + i)


@gluon.jit
def _sampled_thresholds(
    stream, p_lists, seen, slots,
    HEADS: gl.constexpr, SCALED: gl.constexpr, CAPACITY: gl.constexpr, SAMPLES: gl.constexpr,
):  # fmt: skip
    """Return thresholds of each query that somewhat more than `slots` of the `seen` first keys should exceed."""
    QUERIES: gl.constexpr = ROWS // HEADS
    query = gl.arange(0, QUERIES, QUERY)
    o_key = gl.arange(0, KEYS, gl.SliceLayout(1, BY_QUERY))
    _begin(stream)
    for i_sample in range(SAMPLES):
        scores = _scores(stream, i_sample, HEADS, SCALED)
        at = (query * CAPACITY + i_sample * KEYS)[None, :] + o_key[:, None]
        gl.store(p_lists + at, ordered(scores.to(gl.int32, bitcast=True)).to(gl.int64))
    gl.thread_barrier()
    expected = slots * (SAMPLES * KEYS / seen.to(gl.float32))
    rank = (expected + 4 * gl.sqrt(expected) + 4).to(gl.int32)
    thresholds = gl.full([QUERIES], float("nan"), gl.float32, QUERY)
    place = gl.arange(0, SAMPLES * KEYS, LIST)
    for i_query in range(QUERIES):
        bits = gl.load(p_lists + i_query * CAPACITY + place).to(gl.uint32)
        reached = nth_best(bits, rank, SAMPLED_BITS)
        below = gl.where(reached == 0, float("nan"), number(gl.where(reached == 0, reached, reached - 1)))
        thresholds = gl.where(query == i_query, below, thresholds)
    gl.thread_barrier()
    return thresholds


@gluon.jit
def _at(values, i_query):
    """Return one of `values` [queries] as a scalar."""
    query = gl.arange(0, values.shape[0], QUERY)
    return gl.sum(gl.where(query == i_query, values, 0), 0)


@kernel_launcher
@gluon.jit(do_not_specialize=["tiles", "slots"])
def _index_heads_kernel(
    p_q,  # (T, HEADS, D) contiguous
    k_desc,  # (M, D), tiles of KEYS rows
    p_weights,  # (T, HEADS) fp32
    p_k_scale,  # (M,) fp32, if SCALED
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    p_lists,  # (programs, queries, CAPACITY) int64: bits of a score, then the key
    p_chosen,  # (T, n) int32
    tiles,
    slots,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLES: gl.constexpr,  # tiles of keys in the sample
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
):
    QUERIES: gl.constexpr = ROWS // HEADS
    dtype: gl.constexpr = p_q.dtype.element_ty
    BYTES: gl.constexpr = dtype.primitive_bitwidth // 8
    products_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 // BYTES])
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q = gl.allocate_shared_memory(dtype, [ROWS, D], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], k_desc.layout)
    full = barriers(STAGES, 1)
    STEP: gl.constexpr = 16 // BYTES  # numbers of 16 bytes
    q_rows: gl.constexpr = gl.BlockedLayout([1, STEP], [32 * STEP // D, D // STEP], [4, 1], [1, 0])
    query = gl.arange(0, QUERIES, QUERY)
    o_key = gl.arange(0, KEYS, gl.SliceLayout(1, BY_QUERY))
    i_program = gl.program_id(0)
    p_lists += i_program.to(gl.int64) * (QUERIES * CAPACITY)
    loaded = 0
    for i_turn in range(i_program, tiles, gl.num_programs(0)):
        i_tile = tiles - 1 - i_turn  # the last queries, which see the most, come first
        first_query, queries_here = gl.load(p_tiles + 2 * i_tile), gl.load(p_tiles + 2 * i_tile + 1)
        first_key = gl.load(p_first_key + first_query)
        seen = gl.maximum(gl.load(p_position + first_query) + 1, 0)  # keys that all queries of the tile see
        last = gl.load(p_position + first_query + queries_here - 1)
        known = query < queries_here
        position = gl.load(p_position + first_query + query, mask=known, other=-1)
        o_row = gl.arange(0, ROWS, gl.SliceLayout(1, q_rows))
        o_d = gl.arange(0, D, gl.SliceLayout(0, q_rows))
        p_from = p_q + first_query.to(gl.int64) * (HEADS * D) + (o_row * D)[:, None] + o_d[None, :]
        gl.thread_barrier()  # the products of the tile before are done
        q.store(gl.load(p_from, mask=(o_row < queries_here * HEADS)[:, None], other=0.0))
        o_row = gl.arange(0, ROWS, gl.SliceLayout(0, products_layout))
        p_own = p_weights + first_query.to(gl.int64) * HEADS + o_row
        weights = gl.load(p_own, mask=o_row < queries_here * HEADS, other=0.0)
        fence_async_shared()
        gl.thread_barrier()
        nothing = gl.where(known, float("nan"), float("inf"))  # of unordered numbers, all are taken; of others none
        thresholds = nothing
        sampled = (seen > 4 * gl.maximum(slots, SAMPLES * KEYS)).to(gl.int32)
        if sampled != 0:
            distance = seen // KEYS // SAMPLES * KEYS
            stream = k_desc, q, k_buffers, full, weights, p_k_scale, first_key, distance, loaded, SAMPLES
            thresholds = _sampled_thresholds(stream, p_lists, seen, slots, HEADS, SCALED, CAPACITY, SAMPLES)
            thresholds = gl.where(known, thresholds, float("inf"))
            loaded += SAMPLES
        counts = gl.zeros([QUERIES], gl.int32, QUERY)
        begin = 0
        while begin <= last:
            fits = (CAPACITY - gl.max(counts, 0)) // KEYS  # tiles of keys, whatever they contain
            end = gl.minimum(last + 1, begin + fits * KEYS)
            turns = gl.cdiv(end - begin, KEYS)
            stream = k_desc, q, k_buffers, full, weights, p_k_scale, first_key + begin, KEYS, loaded, turns
            _begin(stream)
            for i_key in range(turns):
                first = begin + i_key * KEYS
                scores = _scores(stream, i_key, HEADS, SCALED)
                visible = (first + o_key)[:, None] <= position[None, :]
                taken = visible & ~(scores <= thresholds[None, :])
                counts = _append(p_lists, counts, scores, taken, first, CAPACITY)
            loaded += turns
            begin = end
            if (gl.max(counts, 0) > CAPACITY - SPARE * KEYS) & (begin <= last):
                gl.thread_barrier()
                for i_query in range(QUERIES):
                    count = _at(counts, i_query)
                    if count > slots:
                        kept, worst = keep_best(p_lists + i_query * CAPACITY, p_chosen, count, slots, CAPACITY, False)
                        counts = gl.where(query == i_query, kept, counts)
                        thresholds = gl.where(query == i_query, number(worst), thresholds)
                gl.thread_barrier()
            misled = (sampled != 0) & (begin > last) & (gl.min(gl.where(known, counts, slots), 0) < slots)
            if misled:  # once more, without thresholds of the sample
                sampled = 0
                begin = 0
                counts = gl.zeros([QUERIES], gl.int32, QUERY)
                thresholds = nothing
        gl.thread_barrier()
        for i_query in range(queries_here):
            p_to = p_chosen + (first_query + i_query).to(gl.int64) * slots
            keep_best(p_lists + i_query * CAPACITY, p_to, _at(counts, i_query), slots, CAPACITY, True)
        gl.thread_barrier()
