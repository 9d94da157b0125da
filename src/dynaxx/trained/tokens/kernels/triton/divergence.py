# SPDX-License-Identifier: Apache-2.0
"""The divergence between dense attention and an indexer, over all visible keys, and its gradients.

With t = attention averaged over q heads, s = scores of the indexer and p = softmax(s), a query's divergence is
sum t (log t - log p), and its gradient in s is ds = p - t:

    q, k -> lse of each q head                          index q, k -> lse of the indexer
    tile of queries x tile of keys: q, k, lse of all heads -> t; index q, k, lse -> p -> divergence, ds to memory
    ds, index q, k -> gradients of index q and weights, by tiles of queries; of index k, by tiles of keys

ds is stored for a strip of queries at a time. Each sum has a fixed order, so results are bitwise reproducible. Scores
and lse are in base 2.

Legend: T queries, M keys; Hq q heads of width D; Hi heads of the indexer of width DI.
"""

import triton
import triton.language as tl

from dynaxx.kernels.runtime.launcher import kernel_launcher

LN2 = tl.constexpr(0.6931471805599453)
RUNTIME_SIZES = ["queries", "heads", "group_size", "index_heads", "first_tile", "first_row"]


@triton.jit
def tile_of_queries(p_tiles, p_position, p_first_key, i_tile, BLOCK_Q: tl.constexpr):
    """Return rows [BLOCK_Q], which of them are known, their positions, and the row of their sequence's first key."""
    first, number = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
    o_q = tl.arange(0, BLOCK_Q)
    known, row = o_q < number, (first + o_q).to(tl.int64)
    position = tl.load(p_position + row, mask=known, other=-1)
    return row, known, position, tl.load(p_first_key + first).to(tl.int64)


@triton.jit
def rows_of(p_rows, there, start, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load columns `start` and on of rows that begin at p_rows [ROWS], as [ROWS, BLOCK_D]."""
    o_d = start + tl.arange(0, BLOCK_D)
    return tl.load(p_rows[:, None] + o_d[None, :], mask=there[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def products(p_q, p_k, known, there, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """Return q . k [ROWS, KEYS] of rows that begin at p_q [ROWS] and p_k [KEYS]."""
    total = tl.zeros([p_q.shape[0], p_k.shape[0]], tl.float32)
    if D <= BLOCK_D:
        q, k = rows_of(p_q, known, 0, D, BLOCK_D), rows_of(p_k, there, 0, D, BLOCK_D)
        return tl.dot(q, tl.trans(k), total, input_precision=PRECISION)
    for start in tl.range(0, D, BLOCK_D):
        q, k = rows_of(p_q, known, start, D, BLOCK_D), rows_of(p_k, there, start, D, BLOCK_D)
        total = tl.dot(q, tl.trans(k), total, input_precision=PRECISION)
    return total


@triton.jit
def relu(x):
    """Return max(x, 0), and NaN for NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _index_scores(
    p_q, p_weights, k, row, known, heads, DI: tl.constexpr, BLOCK_DI: tl.constexpr, PRECISION: tl.constexpr
):
    """Return [BLOCK_Q, BLOCK_K]: the sum over heads of weight * relu(q . k)."""
    total = tl.zeros([row.shape[0], k.shape[0]], tl.float32)
    for i_head in tl.range(heads):
        at = row * heads + i_head
        dots = tl.dot(rows_of(p_q + at * DI, known, 0, DI, BLOCK_DI), tl.trans(k), input_precision=PRECISION)
        total += relu(dots) * tl.load(p_weights + at, mask=known, other=0.0)[:, None]
    return total


@triton.jit
def _sum_on(row_max, row_sum, scores):
    """Add 2 ** scores of each row to a running sum, whose unit is 2 ** row_max."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)


@triton.jit
def lse_of(row_max, row_sum):
    """Return the logarithm of a sum; inf for an empty one, so that 2 ** (score - lse) is 0."""
    return tl.where(row_sum == 0, float("inf"), row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum)))


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _attention_lse_kernel(
    p_q,  # (T, Hq, D)
    p_k,  # (M, Hk, D)
    p_tiles,  # (tiles, 2) int32: first query, number of queries
    p_position,  # (T,) int32
    p_first_key,  # (T,) int32
    p_lse,  # (Hq, T) fp32
    queries,
    group_size,
    scale,  # times log2(e)
    q_strides,  # `PackedStrides`
    k_strides,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_tile, i_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, known, position, first_key = tile_of_queries(p_tiles, p_position, p_first_key, i_tile, BLOCK_Q)
    p_rows = p_q + row * q_strides.n + i_head * q_strides.h
    p_k += first_key * k_strides.n + i_head // group_size * k_strides.h
    o_k, last = tl.arange(0, BLOCK_K).to(tl.int64), tl.max(position, 0)
    seen = tl.maximum(tl.min(tl.where(known, position, last), 0) + 1, 0) // BLOCK_K * BLOCK_K  # every query sees these
    row_max, row_sum = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    q = rows_of(p_rows, known, 0, D, BLOCK_D)
    for first in tl.range(0, seen, BLOCK_K):
        p_keys, there = p_k + (first + o_k) * k_strides.n, o_k >= 0
        if D <= BLOCK_D:
            scores = tl.dot(q, tl.trans(rows_of(p_keys, there, 0, D, BLOCK_D)), input_precision=PRECISION)
        else:
            scores = products(p_rows, p_keys, known, there, D, BLOCK_D, PRECISION)
        row_max, row_sum = _sum_on(row_max, row_sum, scores * scale)
    for first in tl.range(seen, last + 1, BLOCK_K):
        key = first + o_k
        scores = products(p_rows, p_k + key * k_strides.n, known, key <= last, D, BLOCK_D, PRECISION) * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        row_max, row_sum = _sum_on(row_max, row_sum, scores)
    tl.store(p_lse + i_head * queries + row, lse_of(row_max, row_sum), mask=known)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _index_lse_kernel(
    p_index_q,  # (T, Hi, DI) contiguous
    p_index_k,  # (M, DI) contiguous
    p_weights,  # (T, Hi) fp32 contiguous
    p_tiles,
    p_position,
    p_first_key,
    p_index_lse,  # (T,) fp32
    index_heads,
    index_scale,  # times log2(e)
    DI: tl.constexpr,
    BLOCK_DI: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, known, position, first_key = tile_of_queries(p_tiles, p_position, p_first_key, i_tile, BLOCK_Q)
    o_k, last = tl.arange(0, BLOCK_K), tl.max(position, 0)
    row_max, row_sum = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    for first in tl.range(0, last + 1, BLOCK_K):
        key = first + o_k
        k = rows_of(p_index_k + (first_key + key) * DI, key <= last, 0, DI, BLOCK_DI)
        scores = _index_scores(p_index_q, p_weights, k, row, known, index_heads, DI, BLOCK_DI, PRECISION)
        scores = tl.where(key[None, :] <= position[:, None], scores * index_scale, float("-inf"))
        row_max, row_sum = _sum_on(row_max, row_sum, scores)
    tl.store(p_index_lse + row, lse_of(row_max, row_sum), mask=known)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _divergence_kernel(
    p_q,
    p_k,
    p_lse,
    p_index_q,
    p_index_k,
    p_weights,
    p_index_lse,
    p_tiles,
    p_position,
    p_first_key,
    p_ds,  # (queries of the strip, columns): p - t
    p_loss,  # (tiles, tiles of keys) fp32: sums of divergence
    first_tile,  # first tile of the strip
    first_row,
    columns,  # a multiple of 16, which Triton must know to load several numbers at once
    queries,
    heads,
    group_size,
    index_heads,
    scale,
    index_scale,
    q_strides,
    k_strides,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_DI: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STORE: tl.constexpr,  # whether ds is needed
    PRECISION: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
):
    i_tile, i_key = tl.program_id(1) + first_tile, tl.program_id(0)
    row, known, position, first_key = tile_of_queries(p_tiles, p_position, p_first_key, i_tile, BLOCK_Q)
    key, last = i_key * BLOCK_K + tl.arange(0, BLOCK_K), tl.max(position, 0)
    loss, zero = 0.0, tl.full([], 0, tl.int64)
    if i_key * BLOCK_K <= last:
        there = key <= last
        visible = (key[None, :] <= position[:, None]) & known[:, None]
        k_row, target = first_key + key, tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        for i_kv in range(heads // group_size):
            p_keys = p_k + k_row * k_strides.n + (zero + i_kv) * k_strides.h
            k = rows_of(p_keys, there, 0, D, BLOCK_D)
            for i_head in tl.range(i_kv * group_size, (i_kv + 1) * group_size):
                p_rows = p_q + row * q_strides.n + (zero + i_head) * q_strides.h
                if D <= BLOCK_D:
                    scores = tl.dot(rows_of(p_rows, known, 0, D, BLOCK_D), tl.trans(k), input_precision=PRECISION)
                else:
                    scores = products(p_rows, p_keys, known, there, D, BLOCK_D, PRECISION)
                lse = tl.load(p_lse + (zero + i_head) * queries + row, mask=known, other=float("inf"))
                target += tl.exp2(scores * scale - lse[:, None])
        target = tl.where(visible, target / heads, 0.0)
        k = rows_of(p_index_k + k_row * DI, there, 0, DI, BLOCK_DI)
        scores = _index_scores(p_index_q, p_weights, k, row, known, index_heads, DI, BLOCK_DI, INDEX_PRECISION)
        logs = scores * index_scale - tl.load(p_index_lse + row, mask=known, other=0.0)[:, None]
        logs = tl.where(visible, logs, 0.0)
        ds = tl.where(visible, tl.exp2(logs) - target, 0.0)
        terms = target * (tl.log2(tl.where(target == 0, 1.0, target)) - logs)
        loss = tl.sum(tl.sum(tl.where(target == 0, 0.0, terms), 1), 0) * LN2
        if STORE:
            p_to = p_ds + ((row - first_row) * columns)[:, None] + key[None, :]
            tl.store(p_to, ds, mask=known[:, None])
    tl.store(p_loss + i_tile * tl.num_programs(0) + i_key, loss)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _index_dq_kernel(
    p_index_q,
    p_index_k,
    p_weights,
    p_ds,
    p_tiles,
    p_position,
    p_first_key,
    p_dq,  # (T, Hi, DI) fp32
    p_dweights,  # (T, Hi) fp32
    first_tile,
    first_row,
    columns,
    index_heads,
    index_scale,
    DI: tl.constexpr,
    BLOCK_DI: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_tile, i_head = tl.program_id(0) + first_tile, tl.program_id(1)
    row, known, position, first_key = tile_of_queries(p_tiles, p_position, p_first_key, i_tile, BLOCK_Q)
    at, last, o_k = row * index_heads + i_head, tl.max(position, 0), tl.arange(0, BLOCK_K)
    q = rows_of(p_index_q + at * DI, known, 0, DI, BLOCK_DI)
    dq, dweights = tl.zeros([BLOCK_Q, BLOCK_DI], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    p_from = p_ds + (row - first_row) * columns
    for first in tl.range(0, last + 1, BLOCK_K):
        key = first + o_k
        k = rows_of(p_index_k + (first_key + key) * DI, key <= last, 0, DI, BLOCK_DI)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        ds = tl.load(p_from[:, None] + key[None, :], mask=known[:, None], other=0.0).to(tl.float32)
        ds = tl.where(dots > 0, ds, 0.0)
        dweights += tl.sum(ds * dots, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    weights = tl.load(p_weights + at, mask=known, other=0.0)
    o_d = tl.arange(0, BLOCK_DI)
    p_to = p_dq + (at * DI)[:, None] + o_d[None, :]
    tl.store(p_to, dq * (weights * index_scale)[:, None], mask=known[:, None] & (o_d < DI)[None, :])
    tl.store(p_dweights + at, dweights * index_scale, mask=known)


@kernel_launcher
@triton.jit(do_not_specialize=[*RUNTIME_SIZES, "keys", "stop_tile", "heads_here"])
def _index_dk_kernel(
    p_index_q,
    p_index_k,
    p_weights,
    p_ds,
    p_tiles,
    p_key_tiles,  # (tiles of keys, 6) int32, see `Places`
    p_dk,  # (parts, M, DI) fp32, to which this strip is added; a part is some heads
    first_tile,
    stop_tile,
    first_row,
    columns,
    keys,
    index_heads,
    heads_here,  # heads per part
    index_scale,
    DI: tl.constexpr,
    BLOCK_DI: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_part, p_own = tl.program_id(1), p_key_tiles + 6 * tl.program_id(0)
    k_row, first, number = tl.load(p_own), tl.multiple_of(tl.load(p_own + 1), BLOCK_K), tl.load(p_own + 2)
    begin, end, offset = tl.load(p_own + 3), tl.load(p_own + 4), tl.load(p_own + 5)
    o_q, o_k, o_d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_DI)
    there = o_k < number
    row_of_key = (k_row + o_k).to(tl.int64)
    k = rows_of(p_index_k + row_of_key * DI, there, 0, DI, BLOCK_DI)
    dk = tl.zeros([BLOCK_K, BLOCK_DI], tl.float32)
    begin = tl.maximum(
        begin + tl.maximum(first - offset, 0) // BLOCK_Q, first_tile
    )  # earlier queries see none of these
    for i_tile in tl.range(begin, tl.minimum(end, stop_tile)):
        first_query, queries_here = tl.load(p_tiles + 2 * i_tile), tl.load(p_tiles + 2 * i_tile + 1)
        known, row = o_q < queries_here, (first_query + o_q).to(tl.int64)
        p_from = p_ds + ((row - first_row) * columns + first)[:, None] + o_k[None, :]
        ds = tl.load(p_from, mask=known[:, None] & there[None, :], other=0.0).to(tl.float32)
        for i_head in tl.range(i_part * heads_here, tl.minimum((i_part + 1) * heads_here, index_heads)):
            at = row * index_heads + i_head
            q = rows_of(p_index_q + at * DI, known, 0, DI, BLOCK_DI)
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weighted = tl.where(dots > 0, ds * tl.load(p_weights + at, mask=known, other=0.0)[:, None], 0.0)
            dk = tl.dot(tl.trans(weighted.to(q.dtype)), q, dk, input_precision=PRECISION)
    p_to = p_dk + ((i_part.to(tl.int64) * keys + row_of_key) * DI)[:, None] + o_d[None, :]
    mask = there[:, None] & (o_d < DI)[None, :]
    tl.store(p_to, tl.load(p_to, mask=mask, other=0.0) + dk * index_scale, mask=mask)
