# SPDX-License-Identifier: Apache-2.0
"""`selection.scorers.int8` in a fused kernel: scores of one 8-bit query per row of q blocks against 8-bit keys.

    8-bit q rows (resident) -> key tiles stream: int32 products -> per kv block: best product + log of the sum of powers

A program processes BLOCK_M (row, q head of one kv head) pairs for some tiles of keys and keeps one number per kv block.
A key costs a product on the matrix unit, at twice the rate and half the bytes of bf16, and three more operations: the
block's largest product, a multiply-add that forms the bits of a float, and their sum. No exponential is computed.

Legend: B batch; Hq, Hk query and kv heads; R rows of q blocks; C kv blocks; N keys; D head_dim.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.primitives.triton.conversion import nearest
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.selection.contract import Candidates
from dynaxx.kernels.selection.triton.query_scores import RUNTIME_SIZES, new_scores, panels_of
from dynaxx.layout import BlockGrid

LN_2 = tl.constexpr(math.log(2))
LEVELS = tl.constexpr(127.0)
ONE = tl.constexpr(8388608.0)  # 2 ** 23: in the bits of a float, one more power of two
RANGE = tl.constexpr(246)  # powers of two spanned by the bits of a block's floats
STEEPEST = tl.constexpr(128.0 * 8388608.0)
SMALLEST = tl.constexpr(1e-30)
NOTHING = tl.constexpr(-(1 << 30))  # less than any product
TILES_PER_PROGRAM = 32  # few enough to balance causal rows, many enough to reuse the queries


class QuantisedKeys(NamedTuple):
    """Keys relative to their center, as integers times a step per kv block."""

    levels: Tensor  # (B, Hk, N, D) int8
    steps: Tensor  # (B, Hk, C) fp32, value of one level


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen", "tiles", "heads", "factor"])
def _quantise_kernel(
    p_x,
    p_center,  # (B, H, D) fp32
    p_levels,  # (B, H, N, D) int8 contiguous
    p_steps,  # (B, H, N) fp32 if each vector has a step, else (B, H, tiles)
    seqlen,
    tiles,
    heads,
    factor,
    x_strides,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    o_n = i_tile * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_n < seqlen)[:, None] & (o_d < D)[None, :]
    p_x += i_bh // heads * x_strides.b + i_bh % heads * x_strides.h
    x = tl.load(p_x + o_n.to(tl.int64)[:, None] * x_strides.n + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    if EACH:
        largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)
        x = nearest(tl.minimum(x * tl.div_rn(largest * 0.0 + LEVELS, largest)[:, None], LEVELS))
        tl.store(p_steps + i_bh * seqlen + o_n, largest * factor, mask=o_n < seqlen)
    else:
        center = tl.load(p_center + i_bh * D + o_d, mask=o_d < D, other=0.0)
        x = tl.where(inside, x - center[None, :], 0.0)
        largest = tl.maximum(tl.max(tl.abs(x)), SMALLEST)
        x = nearest(tl.minimum(x * tl.div_rn(largest * 0.0 + LEVELS, largest), LEVELS))
        tl.store(p_steps + i_bh * tiles + i_tile, largest * factor)
    tl.store(p_levels + (i_bh * seqlen + o_n[:, None]) * D + o_d[None, :], x.to(tl.int8), mask=inside)


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _int8_scores_kernel(
    p_q,  # (B, Hq, R, D) int8
    p_q_steps,  # (B, Hq, R) fp32: value of one level, in units of the exponent bits of a float
    p_k,  # (B, Hk, N, D) int8
    p_k_steps,  # (B, Hk, C) fp32
    p_scores,  # (B, Hq, R, C) fp32 contiguous
    p_candidates,  # (B, Hk, panels, slots) int32
    rows,
    first_row,
    base,
    first_panel,
    panels,
    panel,
    slots,
    seqlen_k,
    kv_blocks,
    group_size,
    offset,
    q_block,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    BLOCKS: tl.constexpr = BLOCK_N // KV_BLOCK
    i_bh = tl.program_id(2).to(tl.int64)
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)  # longest rows first, under a causal mask
    tiles_m = tl.cdiv(panel * group_size, BLOCK_M)
    o_m = i_m % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    i_row = base + i_m // tiles_m * panel + o_m // group_size
    m_m = (o_m < panel * group_size) & (i_row >= 0) & (i_row < rows)
    i_vector = (i_bh * group_size + o_m % group_size) * rows + i_row
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    end = tl.zeros([BLOCK_M], tl.int32) + seqlen_k
    if CAUSAL:
        end = tl.minimum((first_row + i_row + 1) * q_block + offset, seqlen_k)
    end = tl.where(m_m, end, 0)
    shortest = tl.min(tl.where(m_m, end, seqlen_k), 0)
    begin = tl.program_id(0) * TILES
    if LISTED:
        p_candidates += (i_bh * panels + first_panel + i_m // tiles_m) * slots
        stop = tl.minimum(begin + TILES, slots)
        some = tl.load(p_candidates + begin) >= 0
    else:
        stop = tl.minimum(begin + TILES, tl.cdiv(tl.max(end, 0), BLOCK_N))
        some = begin < stop
    if some:
        b_q = tl.load(p_q + i_vector[:, None] * D + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0)
        q_step = tl.load(p_q_steps + i_vector, mask=m_m, other=0.0)
        p_k += i_bh * seqlen_k * D
        for tile in range(begin, stop):
            i_tile = tile
            if LISTED:
                i_tile = tl.load(p_candidates + tile)  # -1: nothing is loaded or stored
            first = i_tile * BLOCK_N
            o_n = first + tl.arange(0, BLOCK_N)
            o_c = first // KV_BLOCK + tl.arange(0, BLOCKS)
            m_c = (o_c >= 0) & (o_c < kv_blocks)
            k_step = tl.load(p_k_steps + i_bh * kv_blocks + o_c, mask=m_c, other=0.0)
            inside = ((o_n >= 0) & (o_n < seqlen_k))[:, None] & m_d[None, :]
            b_k = tl.load(p_k + o_n.to(tl.int64)[:, None] * D + o_d[None, :], mask=inside, other=0)
            product = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.int32)  # [BLOCK_M, BLOCK_N]
            if first + BLOCK_N > shortest:
                product = tl.where(o_n[None, :] < end[:, None], product, NOTHING)
            product = tl.reshape(product, [BLOCK_M, BLOCKS, KV_BLOCK])
            best = tl.max(product, 2)
            slope = tl.maximum(nearest(tl.minimum(q_step[:, None] * k_step[None, :], STEEPEST)), 1.0)
            least = best - ((RANGE * 8388608) >> ((slope.to(tl.int32, bitcast=True) >> 23) - 126))
            start = best * -slope.to(tl.int32) + (RANGE + 1) * 8388608  # may wrap, like the product below
            bits = tl.maximum(product, least[:, :, None]) * slope.to(tl.int32)[:, :, None] + start[:, :, None]
            total = tl.sum(bits.to(tl.float32, bitcast=True), 2)  # hidden keys vanish in fp32 next to the best one
            score = (tl.log2(total) + best * slope / ONE - 120.0) * LN_2
            score = tl.where(best == NOTHING, float("-inf"), score)
            tl.store(p_scores + i_vector[:, None] * kv_blocks + o_c[None, :], score, mask=m_m[:, None] & m_c[None, :])


def quantised_keys(k: Tensor, center: Tensor, kv_block: int) -> QuantisedKeys:
    """Quantize keys to 8 bits, in one pass over them.

    Args:
        k: (B, N, Hk, D).
        center: (B, Hk, D) fp32, subtracted from all keys.
        kv_block: tokens per block.
    """
    return QuantisedKeys(*_quantised(k, kv_block, center, 1.0))


def _quantised(x: Tensor, tile: int, center: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """Quantize (B, N, H, D) to (B, H, N, D) int8; return it and its steps, per tile with a center, else per vector."""
    (batch, seqlen, heads, dim), x = x.shape, unit_stride(x)
    tiles, each = -(-seqlen // tile), center is None
    levels = torch.empty(batch, heads, seqlen, dim, dtype=torch.int8, device=x.device)
    steps = torch.empty(batch, heads, seqlen if each else tiles, dtype=torch.float32, device=x.device)
    _quantise_kernel[(tiles, batch * heads)](
        x,
        steps if center is None else center,
        levels,
        steps,
        seqlen=seqlen,
        tiles=tiles,
        heads=heads,
        factor=factor / LEVELS.value,  # rounded here, as in torch, and not fused with later operations
        x_strides=strides_of(x),
        EACH=each,
        TILE=tile,
        D=dim,
        BLOCK_D=padded(dim),
        num_warps=4,
    )
    return levels, steps


def int8_scores(
    queries: Tensor, keys: QuantisedKeys, first_row: int, grid: BlockGrid, candidates: Candidates | None = None
) -> Tensor:
    """Return the log of the mass that the rows' queries give to each kv block, up to one constant per row.

    Args:
        queries: (B, Hq, R, D) fp32, one per row of q blocks from `first_row`, times the softmax scale.
        keys: result of `quantised_keys`.
        first_row: first row of q blocks.
        grid: lengths and block sizes.
        candidates: see `query_scores`.

    Returns:
        Scores like those of `query_scores`.
    """
    (batch, q_heads, rows, head_dim), kv_heads = queries.shape, keys.levels.shape[1]
    scores = new_scores((batch, q_heads, rows, grid.kv_blocks), candidates, queries.device)
    if not scores.numel() or (candidates is not None and not candidates.blocks.shape[3]):
        return scores
    group_size, kv_block = q_heads // kv_heads, grid.block_size[1]
    levels, steps = _quantised(queries.transpose(1, 2), 32, None, ONE.value / LN_2.value)
    block_m = 64 if head_dim > 128 else 128
    block_n = max(kv_block, 128) if candidates is None else kv_block
    count, where = panels_of(candidates, first_row, rows)
    programs = (
        -(-(where["slots"] or -(-grid.seqlen_k // block_n)) // TILES_PER_PROGRAM),
        count * -(-where["panel"] * group_size // block_m),
        batch * kv_heads,
    )
    _int8_scores_kernel[programs](
        levels,
        steps,
        keys.levels,
        keys.steps,
        scores,
        scores if candidates is None else candidates.blocks,
        rows=rows,
        first_row=first_row,
        **where,
        seqlen_k=grid.seqlen_k,
        kv_blocks=grid.kv_blocks,
        group_size=group_size,
        offset=grid.offset,
        q_block=grid.block_size[0],
        LISTED=candidates is not None,
        CAUSAL=grid.causal,
        KV_BLOCK=kv_block,
        TILES=TILES_PER_PROGRAM,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        D=head_dim,
        BLOCK_D=max(32, padded(head_dim)),  # 32 is the minimum depth of the matrix unit for int8
        num_warps=4,
        num_stages=3,
    )
    return scores
