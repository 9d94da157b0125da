# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One query per row of q blocks against every key, summed to blocks: a matrix product whose output is never stored.

A program takes BLOCK_M (row, q head of one kv head) pairs through some tiles of keys and keeps, of each kv block, the
log of the sum of the exponentials. All q heads of a group share the keys that were read.

Legend: R rows of q blocks, C kv blocks, D head_dim, G q heads of a kv head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.launch import strides, unit_stride
from dynaxx.layout import BlockGrid

LOG2_E = tl.constexpr(math.log2(math.e))
TILES_PER_PROGRAM = 16  # few enough to balance causal rows, many enough to keep the queries


@triton.jit(do_not_specialize=["rows", "first_row", "seqlen_k", "kv_blocks", "kv_heads", "group_size", "offset"])
def _query_scores_kernel(
    p_q,  # (B, Hq, R, D) contiguous, times the softmax scale
    p_k,
    p_scores,  # (B, Hq, R, C) fp32 contiguous
    rows,
    first_row,
    seqlen_k,
    kv_blocks,
    kv_heads,
    group_size,
    offset,
    stride_kb,
    stride_kn,
    stride_kh,
    CAUSAL: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_b = (tl.program_id(2) // kv_heads).to(tl.int64)
    i_hk = (tl.program_id(2) % kv_heads).to(tl.int64)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first, under a causal mask
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows * group_size
    i_row = o_m // group_size
    i_vector = ((i_b * kv_heads + i_hk) * group_size + o_m % group_size) * rows + i_row
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    end = tl.zeros([BLOCK_M], tl.int32) + seqlen_k
    if CAUSAL:
        end = tl.minimum((first_row + i_row + 1) * Q_BLOCK + offset, seqlen_k)
    end = tl.where(m_m, end, 0)
    shortest = tl.min(tl.where(m_m, end, seqlen_k), 0)
    begin = tl.program_id(0) * (TILES * BLOCK_N)
    stop = tl.minimum(begin + TILES * BLOCK_N, tl.max(end, 0))
    if begin < stop:
        b_q = tl.load(p_q + i_vector[:, None] * D + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        p_k += i_b * stride_kb + i_hk * stride_kh
        for first in range(begin, stop, BLOCK_N):
            o_n = first + tl.arange(0, BLOCK_N)
            inside = (o_n < seqlen_k)[:, None] & m_d[None, :]
            b_k = tl.load(p_k + o_n.to(tl.int64)[:, None] * stride_kn + o_d[None, :], mask=inside, other=0.0)
            logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * LOG2_E  # [BLOCK_M, BLOCK_N]
            if first + BLOCK_N > shortest:
                logits = tl.where(o_n[None, :] < end[:, None], logits, float("-inf"))
            o_c = first // KV_BLOCK + tl.arange(0, BLOCK_N // KV_BLOCK)
            blocks = tl.reshape(logits, [BLOCK_M, BLOCK_N // KV_BLOCK, KV_BLOCK])
            best = tl.max(blocks, 2)
            shift = tl.where(best == float("-inf"), 0.0, best)
            total = tl.sum(tl.exp2(blocks - shift[:, :, None]), 2)
            score = (shift + tl.log2(tl.where(total == 0, 1.0, total))) / LOG2_E
            score = tl.where(total == 0, float("-inf"), score)  # nothing is visible
            inside = m_m[:, None] & (o_c < kv_blocks)[None, :]
            tl.store(p_scores + i_vector[:, None] * kv_blocks + o_c[None, :], score, mask=inside)


def query_scores(queries: Tensor, k: Tensor, first_row: int, grid: BlockGrid) -> Tensor:
    """Log of the sum over each kv block's visible keys of exp(query . key).

    Args:
        queries: (B, Hq, R, D), one of each row of q blocks from `first_row`, times the softmax scale, in k's dtype.
        k: (B, seqlen_k, Hk, D).

    Returns:
        (B, Hq, R, C) fp32; a row sees keys up to its last query's; -inf where it sees none of a block.
    """
    (batch, q_heads, rows, head_dim), kv_heads = queries.shape, k.shape[2]
    scores = torch.full((batch, q_heads, rows, grid.kv_blocks), -torch.inf, device=k.device)
    if not scores.numel():
        return scores
    group_size, k = q_heads // kv_heads, unit_stride(k)
    exact, wide = k.dtype == torch.float32, head_dim > 128
    block_m = 32 if exact else 64 if wide else 128
    block_n = max(grid.block_size[1], 64 if exact or wide else 128)
    programs = (
        triton.cdiv(grid.seqlen_k, TILES_PER_PROGRAM * block_n),
        triton.cdiv(rows * group_size, block_m),
        batch * kv_heads,
    )
    _query_scores_kernel[programs](
        queries.contiguous(),
        k,
        scores,
        rows=rows,
        first_row=first_row,
        seqlen_k=grid.seqlen_k,
        kv_blocks=grid.kv_blocks,
        kv_heads=kv_heads,
        group_size=group_size,
        offset=grid.offset,
        **strides("k", k),
        CAUSAL=grid.causal,
        Q_BLOCK=grid.block_size[0],
        KV_BLOCK=grid.block_size[1],
        TILES=TILES_PER_PROGRAM,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        D=head_dim,
        BLOCK_D=padded(head_dim),
        PRECISION="tf32x3" if exact else "tf32",
        num_warps=4 if exact else 8,
        num_stages=1 if exact else 2,
    )
    return scores
