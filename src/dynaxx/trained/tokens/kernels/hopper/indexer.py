# SPDX-License-Identifier: Apache-2.0
"""The indexer with up to four heads on Hopper, streaming; `best.py` keeps the lists.

A program is one warpgroup with the q of 64 queries in shared memory; tiles of 64 keys come by TMA. The next tile's
products are computed while scores are appended to lists; of three programs, some weight products that others compute.

A product leaves columns 8 j + 2 t and 8 j + 2 t + 1 of a row, for all j, in thread t of four. The keys of a tile lie
in memory in such an order (`keys_in_threads`) that these are neighbouring keys: key 16 t + 2 j + e is column
8 j + 2 t + e. A thread then appends a run of entries: the places before it are the counts of the threads before.
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
from dynaxx.kernels.primitives.hopper.signals import barriers, opaque_zero
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.hopper.best import KEYS, best_of_tile, load_keys

ROWS = gl.constexpr(64)  # queries of a tile
STAGES = gl.constexpr(3)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES))
# If $1 is not 0, write key $3 and bits $2 to place $4 of the list $5.
_STORE = gl.constexpr("""
{
    .reg .pred %taken;
    .reg .b64 %to;
    setp.ne.u32 %taken, $1, 0;
    mad.wide.u32 %to, $4, 8, $5;
    @%taken st.global.v2.b32 [%to], {$3, $2};
    mov.b32 $0, $4;
}
""")


@gluon.jit
def keys_in_threads(column):
    """Return the places of keys among the keys of a tile, by columns."""
    return column // 2 % 4 * 16 + column // 8 * 2 + column % 2


@gluon.jit
def _product(source, i_load, i_head):
    """Start the product of a head with the keys of a load that has arrived."""
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k = source[2].index(i_load % STAGES).permute((1, 0))
    return warpgroup_mma(source[1].index(i_head + opaque_zero(i_load)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _start(stream):
    """Start loading the first tiles of keys, and return the first product."""
    source, first_row, distance, loaded, turns = stream
    for i in gl.static_range(STAGES):
        if i < turns:
            load_keys(source[0], source[2], source[3], first_row + i * distance, loaded + i)
    mbarrier.wait(source[3].index(loaded % STAGES), loaded // STAGES & 1)
    return warpgroup_mma_wait(0, deps=[_product(source, loaded, 0)])


@gluon.jit
def _score(stream, i_key, products):
    """Return the scores [ROWS, KEYS] of the `i_key`-th tile of keys, and the first product of the next, in flight."""
    source, first_row, distance, loaded, turns = stream
    k_desc, q_buffers, k_buffers, full, weights, p_k_scale = source
    HEADS: gl.constexpr = q_buffers.shape[0]
    scale = 1.0
    if p_k_scale is not None:
        row = first_row + i_key * distance + gl.arange(0, KEYS, COLUMN)
        scale = gl.load(p_k_scale + row, mask=row < k_desc.shape[0], other=0.0)[None, :]
    total = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    for i_head in gl.static_range(HEADS - 1):
        following = _product(source, loaded + i_key, i_head + 1)
        total = _with_head(total, products, weights[i_head])
        products = warpgroup_mma_wait(0, deps=[following])
    barrier()  # all warps have read the buffer
    if i_key + STAGES < turns:
        load_keys(k_desc, k_buffers, full, first_row + (i_key + STAGES) * distance, loaded + i_key + STAGES)
    i_next = loaded + gl.minimum(i_key + 1, turns - 1)  # behind the last tile, a product that nobody reads
    mbarrier.wait(full.index(i_next % STAGES), i_next // STAGES & 1)
    running = _product(source, i_next, 0)
    total = _with_head(total, products, weights[HEADS - 1])
    return total * scale + 0.0, running  # no -0


@gluon.jit
def _with_head(total, products, weight):
    """Return total with weight * relu(products) added."""
    return total + gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]


@gluon.jit
def _append(p_lists, counts, scores, thresholds, position, first_key, CAPACITY: gl.constexpr, MASKED: gl.constexpr):
    """Append scores of a tile above the thresholds to the lists of their rows, in order; return counts.

    Which scores are taken is -1 or 0. The compiler would keep 32 conditions of a thread in bits of a register, which
    takes three instructions each.
    """
    limits = gl.zeros([ROWS, KEYS], gl.float32, SCORES) + thresholds[:, None]
    taken = gl.inline_asm_elementwise(
        "set.gtu.u32.f32 $0, $1, $2;", "=r,f,f", [scores, limits], dtype=gl.int32, is_pure=True, pack=1
    )
    if MASKED:
        o_key = keys_in_threads(gl.arange(0, KEYS, COLUMN))
        taken = gl.where((first_key + o_key)[None, :] <= position[:, None], taken, 0)
    sixteen = _by_thread(-taken)  # [ROWS, 4, 8, 2]
    eight = _sums_of_two(sixteen)
    four = _sums_of_two(gl.reshape(eight, [ROWS, 4, 4, 2]))
    two = _sums_of_two(gl.reshape(four, [ROWS, 4, 2, 2]))
    own = _sums_of_two(two)  # [ROWS, 4]
    i_thread = gl.arange(0, 4, gl.SliceLayout(0, own.type.layout))
    ends = gl.sum(own << (8 * i_thread)[None, :], 1) * 0x01010101  # a byte per thread: the counts up to here
    before = ((ends << 8)[:, None] >> (8 * i_thread)[None, :]) & 0xFF
    row = gl.arange(0, ROWS, gl.SliceLayout(1, own.type.layout))
    before += (gl.convert_layout(counts, row.type.layout) + row * CAPACITY)[:, None]
    before = _starts_of_two(before, two, [ROWS, 4, 2])
    before = _starts_of_two(before, gl.reshape(four, [ROWS, 4, 2, 2]), [ROWS, 4, 4])
    before = _starts_of_two(before, gl.reshape(eight, [ROWS, 4, 4, 2]), [ROWS, 4, 8])
    place = _starts_of_two(before, sixteen, [ROWS, 4, 8, 2])
    bits = _by_thread(scores.to(gl.int32, bitcast=True))
    place = gl.convert_layout(place, bits.type.layout, assert_trivial=True)
    column = keys_in_threads(gl.arange(0, KEYS, COLUMN))
    key = _by_thread(first_key + column[None, :] + gl.zeros([ROWS, KEYS], gl.int32, SCORES))
    gl.inline_asm_elementwise(
        _STORE, "=r,r,r,r,r,l", [_by_thread(taken), bits, key, place, p_lists.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return counts + gl.convert_layout((ends >> 24) & 0xFF, ROW)


@gluon.jit
def _by_thread(tile):
    """Return a tile [ROWS, KEYS] as [ROWS, 4, KEYS // 8, 2]: threads of a row, and the keys of each in order."""
    return gl.permute(gl.reshape(tile, [ROWS, KEYS // 8, 4, 2]), (0, 2, 1, 3))


@gluon.jit
def _sums_of_two(x):
    """Return the sums of neighbours in the last dimension, of two."""
    left, right = gl.split(x)
    return left + right


@gluon.jit
def _starts_of_two(start, counts, shape: gl.constexpr):
    """Return where the two parts of each run start; `counts` of the parts are [..., 2]."""
    left, _ = gl.split(counts)
    start = gl.convert_layout(start, left.type.layout, assert_trivial=True)
    return gl.reshape(gl.join(start, start + left), shape)


@gluon.jit
def _weights_of_heads(p_rows, known, HEADS: gl.constexpr):
    """Return the weights [ROWS] of four heads; missing heads repeat another."""
    first = gl.load(p_rows, mask=known, other=0.0)
    second = gl.load(p_rows + min(1, HEADS - 1), mask=known, other=0.0)
    third = gl.load(p_rows + min(2, HEADS - 1), mask=known, other=0.0)
    return first, second, third, gl.load(p_rows + (HEADS - 1), mask=known, other=0.0)


@kernel_launcher
@gluon.jit(do_not_specialize=["tiles", "slots"])
def _index_hopper_kernel(
    p_q,  # (T, HEADS, D) contiguous
    k_desc,  # (M, D), tiles of KEYS rows in the order of `keys_in_threads`
    p_weights,  # (T, HEADS) fp32
    p_k_scale,  # (M,) fp32 in the order of k, or None
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_first_row,  # (T,) int32: of k, that of the first key of the query's sequence
    p_next,  # int32: 0, the tiles that programs fetched
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
    o_key = keys_in_threads(gl.arange(0, KEYS, COLUMN))
    p_lists += gl.program_id(0).to(gl.int64) * (ROWS * CAPACITY)
    loaded = 0
    i_turn = gl.program_id(0)
    while i_turn < tiles:
        i_tile = tiles - 1 - i_turn  # the last queries, which see the most, come first
        first_query, queries_here = gl.load(p_tiles + 2 * i_tile), gl.load(p_tiles + 2 * i_tile + 1)
        first_row = gl.load(p_first_row + first_query)
        seen = gl.maximum(gl.load(p_position + first_query) + 1, 0)  # keys that all queries of the tile see
        last = gl.load(p_position + first_query + queries_here - 1)
        known = o_row < queries_here
        row = (first_query + o_row).to(gl.int64)
        position = gl.load(p_position + row, mask=known, other=-1)
        query = gl.arange(0, ROWS, gl.SliceLayout(1, q_rows))
        o_d = gl.arange(0, D, gl.SliceLayout(0, q_rows))
        p_from = p_q + ((first_query + query).to(gl.int64) * (HEADS * D))[:, None] + o_d[None, :]
        barrier()  # the products of the tile before are done
        for i_head in gl.static_range(HEADS):
            q_buffers.index(i_head).store(gl.load(p_from + i_head * D, mask=(query < queries_here)[:, None], other=0.0))
        weights = _weights_of_heads(p_weights + row * HEADS, known, HEADS)
        fence_async_shared()
        barrier()
        source = k_desc, q_buffers, k_buffers, full, weights, p_k_scale
        loaded = best_of_tile(
            source, _start, _score, _append, p_lists, p_chosen + first_query.to(gl.int64) * slots, o_row, o_key,
            position, queries_here, first_row, seen, last, slots, loaded, 0, CAPACITY, SAMPLES,
        )  # fmt: skip
        i_turn = gl.atomic_add(p_next, 1) + gl.num_programs(0)
