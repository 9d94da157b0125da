# SPDX-License-Identifier: Apache-2.0
"""The divergence over the keys that each query chose: target and softmax are renormalised to them.

    a query's keys: rows of k and index k by pointer -> attention averaged over heads, and scores of the indexer
    these -> the chosen share of attention, divergence, and its gradient in the scores, put in place in a row of keys

The gradients of index q, k and weights then follow as over all keys, see `divergence.py`.
"""

import triton
import triton.language as tl

from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.tokens.kernels.triton.divergence import LN2, lse_of, products, relu

RUNTIME_SIZES = ["queries", "heads", "group_size", "index_heads", "first_row"]
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _chosen_keys(p_blocks, position, start, slots, GRAIN: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return keys `start` and on of a query's list [BLOCK_S], and which of them it sees."""
    at = start + tl.arange(0, BLOCK_S)
    block = tl.load(p_blocks + at // GRAIN, mask=at < slots * GRAIN, other=-1)
    key = block.to(tl.int64) * GRAIN + at % GRAIN
    return key, (block >= 0) & (key <= position)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _chosen_scores_kernel(
    p_q,  # (T, Hq, D)
    p_k,  # (M, Hk, D)
    p_lse,  # (Hq, T) fp32, over all visible keys
    p_index_q,  # (T, Hi, DI) contiguous
    p_index_k,  # (M, DI) contiguous
    p_weights,  # (T, Hi) fp32 contiguous
    p_blocks,  # (T, slots) int32
    p_position,
    p_first_key,
    p_target,  # (queries of the strip, slots * GRAIN) fp32: attention averaged over heads
    p_scores,  # the same: scores of the indexer, -inf where there is no key
    first_row,
    queries,
    heads,
    group_size,
    index_heads,
    slots,
    scale,
    index_scale,
    q_strides,
    k_strides,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_DI: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,  # heads at once
    BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
):
    t, start, o_r = (first_row + tl.program_id(0)).to(tl.int64), tl.program_id(1) * BLOCK_S, tl.arange(0, ROWS)
    position, first_key = tl.load(p_position + t), tl.load(p_first_key + t).to(tl.int64)
    key, there = _chosen_keys(p_blocks + t * slots, position, start, slots, GRAIN, BLOCK_S)
    k_row = tl.where(there, first_key + key, 0)
    zero = tl.full([], 0, tl.int64)
    target, scores = tl.zeros([BLOCK_S], tl.float32), tl.zeros([BLOCK_S], tl.float32)
    for i_kv in range(heads // group_size):
        p_keys = p_k + k_row * k_strides.n + (zero + i_kv) * k_strides.h
        for part in range(0, group_size, ROWS):
            known, head = part + o_r < group_size, zero + i_kv * group_size + part + o_r
            p_rows = p_q + t * q_strides.n + head * q_strides.h
            dots = products(p_rows, p_keys, known, there, D, BLOCK_D, PRECISION)
            lse = tl.load(p_lse + head * queries + t, mask=known, other=float("inf"))
            target += tl.sum(tl.exp2(dots * scale - lse[:, None]), 0)
    for part in range(0, index_heads, ROWS):
        known, at = part + o_r < index_heads, t * index_heads + part + o_r
        dots = products(p_index_q + at * DI, p_index_k + k_row * DI, known, there, DI, BLOCK_DI, INDEX_PRECISION)
        scores += tl.sum(relu(dots) * tl.load(p_weights + at, mask=known, other=0.0)[:, None], 0)
    to = tl.program_id(0).to(tl.int64) * slots * GRAIN + start + tl.arange(0, BLOCK_S)
    inside = start + tl.arange(0, BLOCK_S) < slots * GRAIN
    tl.store(p_target + to, tl.where(there, target / heads, 0.0), mask=inside)
    tl.store(p_scores + to, tl.where(there, scores * index_scale, float("-inf")), mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _chosen_divergence_kernel(
    p_target,
    p_scores,
    p_blocks,
    p_position,
    p_ds,  # (queries of the strip, columns), zeros
    p_loss,  # (T,) fp32
    p_mass,  # (T,) fp32: the share of attention on chosen keys
    first_row,
    columns,
    slots,
    STORE: tl.constexpr,  # whether ds is needed
    GRAIN: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    t, o_s = first_row + i_row, tl.arange(0, BLOCK_S)
    position, width = tl.load(p_position + t), slots * GRAIN
    p_target, p_scores = p_target + i_row * width, p_scores + i_row * width
    highest, total, mass = tl.full([BLOCK_S], float("-inf"), tl.float32), tl.zeros([BLOCK_S], tl.float32), 0.0
    for start in range(0, width, BLOCK_S):
        scores = tl.load(p_scores + start + o_s, mask=start + o_s < width, other=float("-inf"))
        new = tl.maximum(highest, scores)
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(highest - shift) + tl.exp2(scores - shift)
        highest = new
        mass += tl.sum(tl.load(p_target + start + o_s, mask=start + o_s < width, other=0.0), 0)
    most = tl.max(highest, 0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    lse = lse_of(most, tl.sum(total * tl.exp2(highest - shift), 0))
    divisor, loss = tl.maximum(mass, TINY, propagate_nan=tl.PropagateNan.ALL), 0.0
    for start in range(0, width, BLOCK_S):
        key, there = _chosen_keys(p_blocks + t * slots, position, start, slots, GRAIN, BLOCK_S)
        logs = tl.where(there, tl.load(p_scores + start + o_s, mask=there, other=0.0) - lse, 0.0)
        target = tl.load(p_target + start + o_s, mask=there, other=0.0) / divisor
        terms = target * (tl.log2(tl.where(target == 0, 1.0, target)) - logs)
        loss += tl.sum(tl.where(target == 0, 0.0, terms), 0)
        if STORE:
            tl.store(p_ds + i_row * columns + key, tl.exp2(logs) * (mass / divisor) - target, mask=there)
    tl.store(p_loss + t, loss * LN2)
    tl.store(p_mass + t, mass)
