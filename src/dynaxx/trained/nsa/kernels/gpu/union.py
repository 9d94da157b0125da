# SPDX-License-Identifier: Apache-2.0
"""Selected attention by query.

    tile of positions x q heads -> for each block of the tile's union: scores, masked by position -> out, lse (or dq)

A program holds the q heads of one selection head at a few neighbouring positions and visits the union of their blocks.
It reads each block once per tile. This pays for groups of 16 and more, or if neighbours select the same blocks.

Legend: T queries, M keys; Hq, Hk, Hs query, kv and selection heads; D head_dim of q and k, E head_dim of v. A tile has
POSITIONS * GROUP rows, position-major, where GROUP is the group size as a power of two.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.config import QueryTiles
from dynaxx.trained.nsa.kernels.gpu.query_unions import Unions
from dynaxx.trained.nsa.kernels.gpu.rows import (
    block_rows,
    gather_rows,
    row_values,
    scatter_rows,
    softmax_step,
    weights_of,
)
from dynaxx.trained.nsa.spans import NsaSpans

RUNTIME_SIZES = ["queries", "keys", "group_size", "heads_per_kv"]


@triton.jit
def tile_rows(
    i_tile, i_head, p_last_key, queries, group_size, POSITIONS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """Return position in the tile, query row, q head, validity and last visible key of each row of a tile, [ROWS]."""
    o_row = tl.arange(0, ROWS)
    position = o_row // GROUP
    member = o_row % GROUP
    t = i_tile * POSITIONS + position
    inside = (position < POSITIONS) & (member < group_size) & (t < queries)
    last_key = tl.load(p_last_key + t, mask=inside, other=-1)
    return position, t, i_head * group_size + member, inside, last_key


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_out,  # (T, Hq, E) contiguous
    p_lse,  # (Hq, T) contiguous, fp32
    p_starts,
    p_members,
    p_counts,
    p_last_key,
    queries,
    keys,
    group_size,
    heads_per_kv,  # selection heads per kv head
    scale,  # > 0
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOTS: tl.constexpr,  # slots in a tile's union
    KV_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SPLIT: tl.constexpr = KV_BLOCK // BLOCK_N
    heads = tl.num_programs(0)
    i_head = tl.program_id(0).to(tl.int64)
    i_tile = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    position, t, h, inside, last_key = tile_rows(
        i_tile, i_head, p_last_key, queries, group_size, POSITIONS, GROUP, ROWS
    )
    b_q = gather_rows(p_q, t, h, q_strides, inside, D, BLOCK_D)
    p_k += i_head // heads_per_kv * k_strides.h
    p_v += i_head // heads_per_kv * v_strides.h
    list_index = i_tile * heads + i_head
    count = tl.load(p_counts + list_index)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for i_step in range(0, count * SPLIT):
        slot = list_index * SLOTS + i_step // SPLIT
        start = tl.load(p_starts + slot) + i_step % SPLIT * BLOCK_N
        limit = tl.where((tl.load(p_members + slot) >> position) & 1 != 0, last_key, -1)
        b_k = block_rows(p_k, start, keys, k_strides.n, D, BLOCK_D, BLOCK_N)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [ROWS, BLOCK_N]
        scores = tl.where((start + tl.arange(0, BLOCK_N))[None, :] <= limit[:, None], scores, float("-inf"))
        row_max, rescale, weights = softmax_step(scores, row_max, scale, b_k.dtype == tl.float32)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        b_v = block_rows(p_v, start, keys, v_strides.n, E, BLOCK_E, BLOCK_N)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=PRECISION)
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), row_max * scale + tl.log(row_sum))
    tl.store(p_lse + h.to(tl.int64) * queries + t, lse, mask=inside)
    q_heads = heads * group_size
    scatter_rows(p_out, acc / row_sum[:, None], t, h, (q_heads * E, E), inside, E, BLOCK_E)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _selected_bwd_dq_kernel(
    p_do,
    p_q,
    p_k,
    p_v,
    p_rows,  # (T, Hq, 2) from `row_pairs`
    p_dq,  # (T, Hq, D) contiguous
    p_starts,
    p_members,
    p_counts,
    p_last_key,
    queries,
    keys,
    group_size,
    heads_per_kv,
    scale,
    do_strides,
    q_strides,
    k_strides,
    v_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    SPLIT: tl.constexpr = KV_BLOCK // BLOCK_N
    heads = tl.num_programs(0)
    i_head = tl.program_id(0).to(tl.int64)
    i_tile = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    position, t, h, inside, last_key = tile_rows(
        i_tile, i_head, p_last_key, queries, group_size, POSITIONS, GROUP, ROWS
    )
    b_q = gather_rows(p_q, t, h, q_strides, inside, D, BLOCK_D)
    b_do = gather_rows(p_do, t, h, do_strides, inside, E, BLOCK_E)
    lse, delta = row_values(p_rows, t * (heads * group_size) + h, inside)
    p_k += i_head // heads_per_kv * k_strides.h
    p_v += i_head // heads_per_kv * v_strides.h
    list_index = i_tile * heads + i_head
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i_step in range(0, tl.load(p_counts + list_index) * SPLIT):
        slot = list_index * SLOTS + i_step // SPLIT
        start = tl.load(p_starts + slot) + i_step % SPLIT * BLOCK_N
        limit = tl.where((tl.load(p_members + slot) >> position) & 1 != 0, last_key, -1)
        b_k = block_rows(p_k, start, keys, k_strides.n, D, BLOCK_D, BLOCK_N)
        b_v = block_rows(p_v, start, keys, v_strides.n, E, BLOCK_E, BLOCK_N)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        weights = weights_of(scores, lse[:, None], scale, b_k.dtype == tl.float32)
        weights = tl.where((start + tl.arange(0, BLOCK_N))[None, :] <= limit[:, None], weights, 0.0)
        dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        ds = weights * (dp - delta[:, None])
        dq = tl.dot(ds.to(b_k.dtype), b_k, dq, input_precision=PRECISION)
    scatter_rows(p_dq, dq * scale, t, h, (heads * group_size * D, D), inside, D, BLOCK_D)


def forward(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NsaSpans, tiles: QueryTiles, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) and lse (Hq, T) fp32; scale > 0."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    _selected_fwd_kernel[(union.counts.shape[1], union.counts.shape[0])](
        q, k, v, out, lse, **_arguments(q, k, v, union, spans, tiles, scale)
    )
    return out, lse


def backward_dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, union: Unions, spans: NsaSpans,
    tiles: QueryTiles, scale: float,
) -> Tensor:  # fmt: skip
    """Return dq (T, Hq, D)."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    _selected_bwd_dq_kernel[(union.counts.shape[1], union.counts.shape[0])](
        do, q, k, v, rows, dq,
        do_strides=packed_strides_of(do),
        **_arguments(q, k, v, union, spans, replace(tiles, num_stages=min(2, tiles.num_stages)), scale),
    )  # fmt: skip
    return dq


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, union: Unions, spans: NsaSpans, tiles: QueryTiles, scale: float
) -> dict[str, object]:
    heads = union.counts.shape[1]
    return {
        "p_starts": union.starts,
        "p_members": union.members,
        "p_counts": union.counts,
        "p_last_key": spans.last_key,
        "queries": q.shape[0],
        "keys": k.shape[0],
        "group_size": q.shape[1] // heads,
        "heads_per_kv": heads // k.shape[1],
        "scale": scale,
        "q_strides": packed_strides_of(q),
        "k_strides": packed_strides_of(k),
        "v_strides": packed_strides_of(v),
        "D": q.shape[2],
        "E": v.shape[2],
        "BLOCK_D": padded(q.shape[2]),
        "BLOCK_E": padded(v.shape[2]),
        "SLOTS": union.starts.shape[2],
        "KV_BLOCK": spans.sizes.slc_block,
        "POSITIONS": tiles.positions,
        "GROUP": tiles.group,
        "ROWS": tiles.rows,
        "BLOCK_N": min(tiles.block_n, spans.sizes.slc_block),
        "PRECISION": "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
