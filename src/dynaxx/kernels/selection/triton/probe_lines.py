# SPDX-License-Identifier: Apache-2.0
"""Attention of the last queries along vertical and slash lines, and block scores from it. No attention is stored.

    probes, keys -> log normaliser per probe (first pass) -> mass per kv block and per distance (second pass) -> scores

The second pass sums attention by kv block (vertical lines) and by distance (slashes). Blocks begin at multiples of S
tokens, where S is the smaller block size, so the ranges of distances between two blocks begin and end at multiples of
S, up to one. Distances are therefore summed to buckets of S - 1 distances, and single distances between two buckets.
Each tile of keys writes its few sums, which are added afterwards in a fixed order.

Legend: B batch; Hq, Hk query and kv heads; P probes; C kv blocks; R rows of q blocks; D head_dim; T tiles of keys; M
buckets of distances.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded, power_of_two
from dynaxx.kernels.runtime.arguments import at_most_fp32, strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockGrid

LOG2_E = math.log2(math.e)
TILES_PER_PROGRAM = 16  # in the first pass


@triton.jit
def _probe_logits(
    p_q, b_k, o_p, o_n, probes, seqlen_k, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return logits [BLOCK_P, BLOCK_N] in base 2 of probes o_p and keys o_n [BLOCK_N, BLOCK_D]; -inf if hidden."""
    o_d = tl.arange(0, BLOCK_D)
    m_q = (o_p < probes)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q + o_p[:, None] * D + o_d[None, :], mask=m_q, other=0.0)
    logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    visible = (o_p < probes)[:, None] & (o_n < seqlen_k)[None, :]
    if CAUSAL:
        visible = visible & (o_n[None, :] <= (seqlen_k - probes + o_p)[:, None])
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def _keys(p_k, o_n, seqlen_k, stride_kn, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    m_k = (o_n < seqlen_k)[:, None] & (o_d < D)[None, :]
    return tl.load(p_k + o_n.to(tl.int64)[:, None] * stride_kn + o_d[None, :], mask=m_k, other=0.0)


@kernel_launcher
@triton.jit(do_not_specialize=["probes", "seqlen_k", "group_size"])
def _normalisers_kernel(
    p_q,  # (B, Hq, P, D) contiguous
    p_k,
    p_lse,  # (B, Hq, parts, P) fp32: log2 of the sum over one part of the keys
    probes,
    seqlen_k,
    group_size,
    scale,
    k_strides,
    CAUSAL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_h, i_part, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_bh = i_b * tl.num_programs(0) + i_h
    p_q += i_bh * probes * D
    p_k += i_b * k_strides.b + i_h // group_size * k_strides.h
    p_lse += (i_bh * tl.num_programs(1) + i_part) * probes
    begin = i_part * TILES * BLOCK_N
    for i_p in range(0, probes, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P)
        best = tl.full([BLOCK_P], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_P], tl.float32)
        for first in range(begin, tl.minimum(begin + TILES * BLOCK_N, seqlen_k), BLOCK_N):
            o_n = first + tl.arange(0, BLOCK_N)
            b_k = _keys(p_k, o_n, seqlen_k, k_strides.n, D, BLOCK_D)
            logits = _probe_logits(p_q, b_k, o_p, o_n, probes, seqlen_k, scale, CAUSAL, D, BLOCK_D, PRECISION)
            new = tl.maximum(best, tl.max(logits, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(best - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
            best = new
        lse = tl.where(total == 0, float("-inf"), best + tl.log2(tl.where(total == 0, 1.0, total)))
        tl.store(p_lse + o_p, lse, mask=o_p < probes)


@kernel_launcher
@triton.jit(do_not_specialize=["probes", "seqlen_k", "kv_blocks", "group_size", "phase"])
def _probe_lines_kernel(
    p_q,  # (B, Hq, P, D) contiguous
    p_k,
    p_lse,  # (B, Hq, P) fp32, base 2
    p_vertical,  # (B, Hq, C) fp32
    p_slash,  # (B, Hq, T, 2, BUCKETS) fp32: buckets of S - 1 distances, and the single distances after them
    probes,
    seqlen_k,
    kv_blocks,
    group_size,
    phase,
    scale,
    k_strides,
    CAUSAL: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_hk, i_tile, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p_k += i_b * k_strides.b + i_hk * k_strides.h
    o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b_k = _keys(p_k, o_n, seqlen_k, k_strides.n, D, BLOCK_D)
    o_j = tl.arange(0, BUCKETS)
    o_c = i_tile * (BLOCK_N // KV_BLOCK) + tl.arange(0, BLOCK_N // KV_BLOCK)
    for i_g in range(group_size):  # all heads of the group read the same keys
        i_bh = (i_b * tl.num_programs(0) + i_hk) * group_size + i_g
        vertical = tl.zeros([BLOCK_N // KV_BLOCK], tl.float32)
        wide, single = tl.zeros([BUCKETS], tl.float32), tl.zeros([BUCKETS], tl.float32)
        for i_p in range(0, probes, BLOCK_P):
            o_p = i_p + tl.arange(0, BLOCK_P)
            p_own = p_q + i_bh * probes * D
            logits = _probe_logits(p_own, b_k, o_p, o_n, probes, seqlen_k, scale, CAUSAL, D, BLOCK_D, PRECISION)
            lse = tl.load(p_lse + i_bh * probes + o_p, mask=o_p < probes, other=0.0)
            shares = tl.exp2(logits - tl.where(lse == float("-inf"), 0.0, lse)[:, None]) / probes
            vertical += tl.sum(tl.reshape(tl.sum(shares, 0), [BLOCK_N // KV_BLOCK, KV_BLOCK]), 1)
            for j in range((phase + i_p) // STEP, (phase + BLOCK_N + i_p + BLOCK_P - 2) // STEP + 1):
                # Distances, counted from the start of bucket j of this tile.
                distance = (phase + BLOCK_N - 1 - j * STEP + o_p)[:, None] - tl.arange(0, BLOCK_N)[None, :]
                between = (distance >= 0) & (distance < STEP - 1)
                wide += tl.where(o_j == j, tl.sum(tl.where(between, shares, 0.0)), 0.0)
                single += tl.where(o_j == j, tl.sum(tl.where(distance == STEP - 1, shares, 0.0)), 0.0)
        tl.store(p_vertical + i_bh * kv_blocks + o_c, vertical, mask=o_c < kv_blocks)
        p_own = p_slash + (i_bh * tl.num_programs(1) + i_tile) * 2 * BUCKETS
        tl.store(p_own + o_j, wide)
        tl.store(p_own + BUCKETS + o_j, single)


@kernel_launcher
@triton.jit(do_not_specialize=["tiles", "diagonals", "shift"])
def _diagonals_kernel(
    p_slash,  # (B, Hq, T, 2, BUCKETS) fp32
    p_diagonal,  # (B, Hq, diagonals) fp32: mass of the distances within the blocks of each diagonal
    tiles,
    diagonals,
    shift,
    TILE_STEPS: tl.constexpr,
    SPAN: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    i_bh = tl.program_id(1).to(tl.int64)
    o_x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    p_slash += i_bh * tiles * 2 * BUCKETS
    total = tl.zeros([BLOCK_X], tl.float32)
    for u in range(SPAN):
        o_m = o_x + shift + u  # buckets, counted from the first bucket of the last tile
        for c in range((BUCKETS + TILE_STEPS - 1) // TILE_STEPS):
            i_tile = tiles - 1 - (o_m // TILE_STEPS - c)
            i_bucket = o_m % TILE_STEPS + c * TILE_STEPS
            inside = (o_m >= 0) & (i_tile >= 0) & (i_tile < tiles) & (i_bucket < BUCKETS)
            p_own = p_slash + i_tile.to(tl.int64) * 2 * BUCKETS + i_bucket
            total += tl.load(p_own, mask=inside, other=0.0)
            total += tl.load(p_own + BUCKETS, mask=inside & (u < SPAN - 1), other=0.0)
    tl.store(p_diagonal + i_bh * diagonals + o_x, total, mask=o_x < diagonals)


@kernel_launcher
@triton.jit(do_not_specialize=["first_row", "rows", "kv_blocks", "diagonals"])
def _line_scores_kernel(
    p_vertical,  # (B, Hq, C) fp32
    p_diagonal,  # (B, Hq, diagonals) fp32
    p_scores,  # (B, Hq, rows, C) fp32 contiguous
    first_row,
    rows,
    kv_blocks,
    diagonals,
    Q_STEPS: tl.constexpr,
    KV_STEPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_row, i_bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < kv_blocks
    diagonal = (first_row + i_row) * Q_STEPS + (kv_blocks - 1 - o_c) * KV_STEPS
    mass = tl.load(p_vertical + i_bh * kv_blocks + o_c, mask=m_c, other=1.0)
    mass += tl.load(p_diagonal + i_bh * diagonals + diagonal, mask=m_c, other=0.0)
    tl.store(p_scores + (i_bh * rows + i_row) * kv_blocks + o_c, tl.log(mass), mask=m_c)


def probe_lines(probes: Tensor, k: Tensor, grid: BlockGrid, scale: float) -> tuple[Tensor, Tensor]:
    """Return the mean attention of the last queries, summed along lines.

    Args:
        probes: (B, P, Hq, D), the last queries, in k's dtype.
        k: (B, seqlen_k, Hk, D).
        grid: lengths and block sizes.
        scale: softmax scale.

    Returns:
        (B, Hq, C) fp32, the mass of each kv block's keys; and (B, Hq, diagonals) fp32, the mass of the distances
        between queries and keys of a block, by diagonal. Row r and block c lie on diagonal
        r q_block / S + (C - 1 - c) kv_block / S.
    """
    (batch, count, q_heads, head_dim), (q_block, kv_block) = probes.shape, grid.block_size
    probes, k, step = at_most_fp32(probes), unit_stride(at_most_fp32(k)), min(grid.block_size)
    exact, wide = k.dtype == torch.float32, head_dim > 128
    block_p = 32 if exact else 64
    block_n = max(kv_block, 64 if exact or wide else 128)
    tiles = -(-grid.seqlen_k // block_n)
    phase = (grid.seqlen_q - count) % step
    buckets = power_of_two((step + block_n - (-count // block_p) * block_p - 3) // step + 1)
    new = lambda *shape: torch.empty(batch, q_heads, *shape, dtype=torch.float32, device=k.device)
    common = {
        "probes": count,
        "seqlen_k": grid.seqlen_k,
        "group_size": q_heads // k.shape[2],
        "scale": scale * LOG2_E,
        "k_strides": strides_of(k),
        "CAUSAL": grid.causal,
        "BLOCK_P": block_p,
        "BLOCK_N": block_n,
        "D": head_dim,
        "BLOCK_D": padded(head_dim),
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": 4,
        "num_stages": 1 if exact else 2,
    }
    rows = probes.transpose(1, 2).contiguous()
    parts = new(-(-tiles // TILES_PER_PROGRAM), count)
    _normalisers_kernel[(q_heads, parts.shape[2], batch)](rows, k, parts, **common, TILES=TILES_PER_PROGRAM)
    lse = parts.mul_(1 / LOG2_E).logsumexp(2).mul_(LOG2_E)
    vertical, slash = new(grid.kv_blocks), new(tiles, 2, buckets)
    _probe_lines_kernel[(k.shape[2], tiles, batch)](
        rows,
        k,
        lse,
        vertical,
        slash,
        **common,
        kv_blocks=grid.kv_blocks,
        phase=phase,
        KV_BLOCK=kv_block,
        STEP=step,
        BUCKETS=buckets,
    )
    # Bucket m holds the distances from offset + 1 + m S on. Those of row r and block c begin at bucket
    # (r q_block - (c + 1) kv_block) / S; the first bucket of the last tile is (seqlen_q - P - phase - T BLOCK_N) / S.
    first = (grid.seqlen_q - count - phase - tiles * block_n) // step
    diagonals = ((grid.q_blocks - 1) * q_block + (grid.kv_blocks - 1) * kv_block) // step + 1
    diagonal = new(diagonals)
    _diagonals_kernel[(-(-diagonals // 256), batch * q_heads)](
        slash,
        diagonal,
        tiles=tiles,
        diagonals=diagonals,
        shift=-grid.kv_blocks * kv_block // step - first,
        TILE_STEPS=block_n // step,
        SPAN=(q_block + kv_block) // step,
        BUCKETS=buckets,
        BLOCK_X=256,
    )
    return vertical, diagonal


def line_scores(vertical: Tensor, diagonal: Tensor, start: int, stop: int, grid: BlockGrid) -> Tensor:
    """Return the log of the mass of the lines that cross each block: (B, Hq, stop - start, C) fp32."""
    batch, q_heads, kv_blocks = vertical.shape
    scores = torch.empty(batch, q_heads, stop - start, kv_blocks, device=vertical.device, dtype=torch.float32)
    step = min(grid.block_size)
    _line_scores_kernel[(-(-kv_blocks // 1024), stop - start, batch * q_heads)](
        vertical,
        diagonal,
        scores,
        first_row=start,
        rows=stop - start,
        kv_blocks=kv_blocks,
        diagonals=diagonal.shape[2],
        Q_STEPS=grid.block_size[0] // step,
        KV_STEPS=grid.block_size[1] // step,
        BLOCK_C=1024,
    )
    return scores
