# SPDX-License-Identifier: Apache-2.0
"""The indexer with many heads on Hopper, streaming; `indexer.py` serves up to four, and `best.py` keeps the lists.

A program is one warpgroup with the q of a few queries times all heads, 256 rows, in shared memory. Tiles of 64 keys
come by TMA and are the rows of products, so that a thread adds its heads in registers:

    k of 64 keys x q of 256 (query, head) -> relu, weighted -> sum over heads: scores of 64 keys for each query
    -> those above the query's threshold, appended to its list by one warp per query, while the next product runs
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

from dynaxx.kernels.compat import barrier
from dynaxx.kernels.primitives.hopper.signals import barriers
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.best import KEYS, best_of_tile, load_keys

ROWS = gl.constexpr(256)  # queries times heads of a tile
BY_QUERY = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))  # [KEYS, queries]: a warp has whole queries
# A warp has the scores of 64 keys for a query, a thread those of two neighbours; $4 and $5 are 1 if they are taken. $0
# and $1 become the numbers of taken keys before them, $2 and $3 the number of all that are taken.
_BALLOT = gl.constexpr("""
{
    .reg .pred %left, %right;
    .reg .b32 %lefts, %rights, %lower;
    setp.ne.u32 %left, $4, 0;
    setp.ne.u32 %right, $5, 0;
    vote.sync.ballot.b32 %lefts, %left, -1;
    vote.sync.ballot.b32 %rights, %right, -1;
    popc.b32 $2, %lefts;
    popc.b32 $3, %rights;
    add.u32 $2, $2, $3;
    mov.b32 $3, $2;
    mov.u32 %lower, %lanemask_lt;
    and.b32 %lefts, %lefts, %lower;
    and.b32 %rights, %rights, %lower;
    popc.b32 $0, %lefts;
    popc.b32 $1, %rights;
    add.u32 $0, $0, $1;
    add.u32 $1, $0, $4;
}
""")
QUERY, KEY = gl.constexpr(gl.SliceLayout(0, BY_QUERY)), gl.constexpr(gl.SliceLayout(1, BY_QUERY))


@gluon.jit
def _product(source, i_load):
    """Start the product of the keys of a load, which has arrived, with all rows of q."""
    q, k_buffers = source[1], source[2]
    zero = gl.zeros([KEYS, ROWS], gl.float32, _products_layout(q.dtype.primitive_bitwidth // 8))
    k = k_buffers.index(i_load % k_buffers.shape[0])
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.constexpr_function
def _products_layout(itemsize):
    """Return the layout of a product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 32 // itemsize])


@gluon.jit
def _start(stream):
    """Start loading the first tiles of keys, and return the first product."""
    source, first_row, distance, loaded, turns = stream
    STAGES: gl.constexpr = source[2].shape[0]
    for i in gl.static_range(STAGES):
        if i < turns:
            load_keys(source[0], source[2], source[3], first_row + i * distance, loaded + i)
    mbarrier.wait(source[3].index(loaded % STAGES), loaded // STAGES & 1)
    return warpgroup_mma_wait(0, deps=[_product(source, loaded)])


@gluon.jit
def _score(stream, i_key, products):
    """Return scores [KEYS, queries] of the `i_key`-th tile of keys, and the first product of the next, in flight."""
    source, first_row, distance, loaded, turns = stream
    k_desc, _, k_buffers, full, weights, p_k_scale, query = source
    STAGES: gl.constexpr = k_buffers.shape[0]
    scale = 1.0
    if p_k_scale is not None:
        row = first_row + i_key * distance + gl.arange(0, KEYS, KEY)
        scale = gl.load(p_k_scale + row, mask=row < k_desc.shape[0], other=0.0)[:, None]
    barrier()  # all warps have read the buffer
    if i_key + STAGES < turns:
        load_keys(k_desc, k_buffers, full, first_row + (i_key + STAGES) * distance, loaded + i_key + STAGES)
    positive = gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    by_query = gl.reshape(positive * weights[None, :], [KEYS, query.shape[0], ROWS // query.shape[0]])
    scores = gl.sum(by_query, 2)
    i_next = loaded + gl.minimum(i_key + 1, turns - 1)  # behind the last tile, a product that nobody reads
    mbarrier.wait(full.index(i_next % STAGES), i_next // STAGES & 1)
    running = _product(source, i_next)
    return gl.convert_layout(scores, BY_QUERY) * scale + 0.0, running  # no -0


@gluon.jit
def _append(
    p_lists, counts, scores, thresholds, position, first_key, CAPACITY: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Append scores of a tile above the thresholds to the lists of their queries, in order; return counts."""
    key = first_key + gl.arange(0, KEYS, KEY)
    taken = ~(scores <= thresholds[None, :])
    if MASKED:
        taken = taken & (key[:, None] <= position[None, :])
    before, all_taken = gl.inline_asm_elementwise(
        _BALLOT, "=&r,=&r,=&r,=&r,r,r", [taken.to(gl.int32)], dtype=(gl.int32, gl.int32), is_pure=False, pack=2
    )
    query = gl.arange(0, scores.shape[1], QUERY)
    place = (query * CAPACITY + counts)[None, :] + before
    entry = (scores.to(gl.int32, bitcast=True).to(gl.int64) << 32) | key.to(gl.uint32).to(gl.int64)[:, None]
    gl.store(p_lists + place, entry, mask=taken)
    return counts + gl.max(all_taken, 0)


@kernel_launcher
@gluon.jit(do_not_specialize=["tiles", "slots"])
def _index_heads_kernel(
    p_q,  # (T, HEADS, D) contiguous
    k_desc,  # (M, D), tiles of KEYS rows
    p_weights,  # (T, HEADS) fp32
    p_k_scale,  # (M,) fp32, or None
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_first_row,  # (T,) int32: of k, that of the first key of the query's sequence
    p_next,  # int32: 0, the tiles that programs fetched
    p_lists,  # (programs, queries, CAPACITY) int64: bits of a score, then the key
    p_chosen,  # (T, n) int32
    tiles,
    slots,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLES: gl.constexpr,  # tiles of keys in the sample
    STAGES: gl.constexpr,
):
    QUERIES: gl.constexpr = ROWS // HEADS
    dtype: gl.constexpr = p_q.dtype.element_ty
    BYTES: gl.constexpr = dtype.primitive_bitwidth // 8
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q = gl.allocate_shared_memory(dtype, [ROWS, D], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], k_desc.layout)
    full = barriers(STAGES, 1)
    STEP: gl.constexpr = 16 // BYTES  # numbers of 16 bytes
    q_rows: gl.constexpr = gl.BlockedLayout([1, STEP], [32 * STEP // D, D // STEP], [4, 1], [1, 0])
    query = gl.arange(0, QUERIES, QUERY)
    o_key = gl.arange(0, KEYS, KEY)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, q_rows))
    o_d = gl.arange(0, D, gl.SliceLayout(0, q_rows))
    o_column = gl.arange(0, ROWS, gl.SliceLayout(0, _products_layout(BYTES)))
    p_lists += gl.program_id(0).to(gl.int64) * (QUERIES * CAPACITY)
    loaded = 0
    i_turn = gl.program_id(0)
    while i_turn < tiles:
        i_tile = tiles - 1 - i_turn  # the last queries, which see the most, come first
        first_query, queries_here = gl.load(p_tiles + 2 * i_tile), gl.load(p_tiles + 2 * i_tile + 1)
        first_row = gl.load(p_first_row + first_query)
        seen = gl.maximum(gl.load(p_position + first_query) + 1, 0)  # keys that all queries of the tile see
        last = gl.load(p_position + first_query + queries_here - 1)
        position = gl.load(p_position + first_query + query, mask=query < queries_here, other=-1)
        p_from = p_q + first_query.to(gl.int64) * (HEADS * D) + (o_row * D)[:, None] + o_d[None, :]
        barrier()  # the products of the tile before are done
        q.store(gl.load(p_from, mask=(o_row < queries_here * HEADS)[:, None], other=0.0))
        p_own = p_weights + first_query.to(gl.int64) * HEADS + o_column
        weights = gl.load(p_own, mask=o_column < queries_here * HEADS, other=0.0)
        fence_async_shared()
        barrier()
        source = k_desc, q, k_buffers, full, weights, p_k_scale, query
        loaded = best_of_tile(
            source, _start, _score, _append, p_lists, p_chosen + first_query.to(gl.int64) * slots, query, o_key,
            position, queries_here, first_row, seen, last, slots, loaded, 1, CAPACITY, SAMPLES,
        )  # fmt: skip
        i_turn = gl.atomic_add(p_next, 1) + gl.num_programs(0)
