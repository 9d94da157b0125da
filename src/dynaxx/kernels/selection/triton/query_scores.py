# SPDX-License-Identifier: Apache-2.0
"""Scores of one query per row of q blocks against every key, summed to blocks, without storing the product.

    query rows (resident) -> key tiles stream: products -> log of the sum of exponentials per kv block

A program processes BLOCK_M (row, q head of one kv head) pairs for some tiles of keys. For each kv block it keeps the
log of the sum of exponentials. All q heads of a group share the loaded keys.

Legend: B batch; Hq, Hk query and kv heads; R rows of q blocks; C kv blocks; D head_dim; G q heads per kv head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import gpu_of, padded
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockGrid

LOG2_E = tl.constexpr(math.log2(math.e))
RUNTIME_SIZES = ["rows", "first_row", "seqlen_k", "kv_blocks", "kv_heads", "group_size", "offset", "q_block", "tiles"]
MAX_TILES = 16  # per program: few enough to balance causal rows, many enough to reuse the queries
MIN_TILES = 4
PROGRAMS = 512  # programs that fill a GPU; with fewer of them, each processes fewer tiles


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _query_scores_kernel(
    p_q,  # (B, Hq, R, D) contiguous, multiplied by the softmax scale
    p_k,
    p_scores,  # (B, Hq, R, C) fp32 contiguous
    p_places,  # (C,) int32: block of k that holds each block
    rows,
    first_row,
    seqlen_k,
    kv_blocks,
    kv_heads,
    group_size,
    offset,
    q_block,
    tiles,  # of keys per program
    k_strides,
    PLACED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_b = (tl.program_id(2) // kv_heads).to(tl.int64)
    i_hk = (tl.program_id(2) % kv_heads).to(tl.int64)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)  # longest rows first, under a causal mask
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    i_row = o_m // group_size
    m_m = i_row < rows
    i_vector = ((i_b * kv_heads + i_hk) * group_size + o_m % group_size) * rows + i_row
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    end = tl.zeros([BLOCK_M], tl.int32) + seqlen_k
    if CAUSAL:
        end = tl.minimum((first_row + i_row + 1) * q_block + offset, seqlen_k)
    end = tl.where(m_m, end, 0)
    shortest = tl.min(tl.where(m_m, end, seqlen_k), 0)
    begin = tl.program_id(0) * tiles
    stop = tl.minimum(begin + tiles, tl.cdiv(tl.max(end, 0), BLOCK_N))
    if begin < stop:
        b_q = tl.load(p_q + i_vector[:, None] * D + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        p_k += i_b * k_strides.b + i_hk * k_strides.h
        for i_tile in range(begin, stop):
            first = i_tile * BLOCK_N
            o_n = first + tl.arange(0, BLOCK_N)
            inside = (o_n < seqlen_k)[:, None] & m_d[None, :]
            o_k = o_n
            if PLACED:
                o_k = tl.load(p_places + i_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
            b_k = tl.load(p_k + o_k.to(tl.int64)[:, None] * k_strides.n + o_d[None, :], mask=inside, other=0.0)
            logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if first + BLOCK_N > shortest:
                logits = tl.where(o_n[None, :] < end[:, None], logits, float("-inf"))
            o_c = first // KV_BLOCK + tl.arange(0, BLOCK_N // KV_BLOCK)
            blocks = tl.reshape(logits, [BLOCK_M, BLOCK_N // KV_BLOCK, KV_BLOCK])
            best = tl.max(blocks, 2)
            shift = tl.where(best == float("-inf"), 0.0, best)
            total = tl.sum(tl.exp2(blocks * LOG2_E - (shift * LOG2_E)[:, :, None]), 2)
            score = shift + tl.log2(tl.where(total == 0, 1.0, total)) / LOG2_E
            score = tl.where(total == 0, float("-inf"), score)  # no visible key
            inside = m_m[:, None] & (o_c < kv_blocks)[None, :]
            tl.store(p_scores + i_vector[:, None] * kv_blocks + o_c[None, :], score, mask=inside)


def query_scores(
    queries: Tensor,
    k: Tensor,
    first_row: int,
    grid: BlockGrid,
    places: Tensor | None = None,
    q_block: int | None = None,
) -> Tensor:
    """Return the log of the sum over each kv block's visible keys of exp(query . key).

    Args:
        queries: (B, Hq, R, D), one per row of q blocks from `first_row`, times the softmax scale, in k's dtype.
        k: (B, seqlen_k, Hk, D).
        first_row: first row of q blocks.
        grid: lengths and block sizes.
        places: (kv blocks,) int32: block i of the keys is block places[i] of k, (1, rows, Hk, D).
        q_block: queries per row; the grid's q block by default.

    Returns:
        (B, Hq, R, C) fp32; a row sees the keys up to that of its last query. Scores of blocks of which a row sees
        nothing are undefined.
    """
    (batch, q_heads, rows, head_dim), kv_heads = queries.shape, k.shape[2]
    scores = torch.empty(batch, q_heads, rows, grid.kv_blocks, device=k.device, dtype=torch.float32)
    if not scores.numel():
        return scores
    group_size, k = q_heads // kv_heads, unit_stride(k)
    exact, wide = k.dtype == torch.float32, head_dim > 128
    block_m = 32 if exact else 64 if wide else 128
    block_n = grid.block_size[1]
    if places is None:
        block_n = max(block_n, 64 if exact or wide else 128)
    all_tiles, lines = -(-grid.seqlen_k // block_n), -(-rows * group_size // block_m)
    tiles = min(MAX_TILES, max(MIN_TILES, all_tiles * lines * batch * kv_heads // PROGRAMS))
    programs = (-(-all_tiles // tiles), lines, batch * kv_heads)
    _query_scores_kernel[programs](
        queries.contiguous(),
        k,
        scores,
        scores if places is None else places,
        rows=rows,
        first_row=first_row,
        seqlen_k=grid.seqlen_k,
        kv_blocks=grid.kv_blocks,
        kv_heads=kv_heads,
        group_size=group_size,
        offset=grid.offset,
        q_block=q_block or grid.block_size[0],
        tiles=tiles,
        k_strides=strides_of(k),
        PLACED=places is not None,
        CAUSAL=grid.causal,
        KV_BLOCK=grid.block_size[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        D=head_dim,
        BLOCK_D=padded(head_dim),
        PRECISION=gpu_of(k.device).input_precision(exact),
        num_warps=4 if exact else 8,
        num_stages=1 if exact else 2 if places is None else 3,  # one more, in which places are loaded
    )
    return scores
