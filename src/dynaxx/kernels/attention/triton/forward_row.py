# SPDX-License-Identifier: Apache-2.0
"""The loop of the forward kernel over the tiles of its row, in three orders; see `forward`.

    attend                    load k, v -> scores -> softmax -> weights @ v
    attend_ahead              softmax of a tile -> weights @ v -> scores of the next tile
    attend_ahead OVERLAPPED   softmax of a tile -> scores of the next tile -> weights @ v, during the next softmax

`attend_ahead` is for tiles loaded by TMA. Triton requests the tiles of the next step at the end of a step, so they
arrive during the softmax. If RELATIVE, weights of full tiles are relative to the largest score of the partial ones,
without maxima and rescaling. A row's sum then tells whether they stayed in range (`out_of_range`); if not, the row is
computed again with maxima.
"""

import triton
import triton.language as tl

from dynaxx.kernels.primitives.numbers import LOG2E, exp_rounded, tanh
from dynaxx.kernels.primitives.triton.bias import pair_bias
from dynaxx.kernels.primitives.triton.tiles import (
    FULL,
    PARTIAL,
    entry_of_step,
    load_tile,
    steps_of_pass,
    tile_of_pass,
    tile_positions,
)
from dynaxx.kernels.primitives.triton.visible import load_band, where_shown, where_visible

MOST = tl.constexpr(2.0**64)  # largest weight relative to a row's first tiles; reached by scores that are 44 higher


@triton.jit
def out_of_range(acc, row_sum):
    """Return which rows have weights that are NaN or outside the range of bf16 and fp32."""
    finite = tl.sum(acc * 0.0, 1) == 0.0
    return ((row_sum <= MOST) & finite) == 0


@triton.jit
def _softmax_step(scores, row_max, row_sum, scale, MASKING: tl.constexpr, EXACT: tl.constexpr):
    """Return weights [BLOCK_M, BLOCK_N] of a tile, the factor for earlier sums, new maximum and new sum of each row."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = new_max
    if MASKING == PARTIAL:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if EXACT:  # in fp32, the rounding of two products that nearly cancel would be visible
        rescale = exp_rounded((row_max - shift) * scale)
        weights = exp_rounded((scores - shift[:, None]) * scale)
    else:
        scale_log2 = scale * LOG2E
        rescale = tl.exp2((row_max - shift) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - (shift * scale_log2)[:, None])
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def attend(
    acc,  # [BLOCK_M, BLOCK_E] fp32, sum of p @ v
    row_max,  # [BLOCK_M] fp32, of the unscaled scores
    row_sum,  # [BLOCK_M] fp32
    b_q,  # [BLOCK_M, BLOCK_D]
    inner_q,  # [BLOCK_M], positions in the q block
    k,  # `HeadRows`
    v,
    scale,  # > 0
    cap,  # softcap / scale
    row,  # `LayoutRow`
    masks,  # `Masks`
    bias,  # `HeadBias`, if BIAS; scores then include the scale
    MASKING: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Attend to the tiles of a pass."""
    BLOCK_D: tl.constexpr = b_q.shape[1]
    BLOCK_E: tl.constexpr = acc.shape[1]
    for i_step in range(row.whole if MASKING == FULL else row.partial_tiles + row.left):
        first, count, i_tile, is_full = tile_of_pass(i_step, row, MASKING)
        first_k, offsets, inner_k, mask_id = tile_positions(
            row.tables, first, count, i_tile, k.seqlen, KV_BLOCK, BLOCK_N, MASKING
        )
        b_k = load_tile(k, first_k, offsets, D, BLOCK_D, BLOCK_N, MASKING == PARTIAL, TMA)
        scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if CAPPED:
            scores = cap * tanh(scores / cap)
        if BIAS != "none":
            scores = scores * scale + pair_bias(bias, inner_q[:, None], (first_k + offsets)[None, :], BIAS)
        if MASKING == PARTIAL:
            scores = where_visible(
                scores, float("-inf"), mask_id, is_full, masks, inner_q, inner_k, first_k, offsets, k.seqlen,
                Q_BLOCK, KV_BLOCK,
            )  # fmt: skip
        weights, rescale, row_max, row_sum = _softmax_step(
            scores, row_max, row_sum, scale if BIAS == "none" else 1.0, MASKING, b_q.dtype == tl.float32
        )
        b_v = load_tile(v, first_k, offsets, E, BLOCK_E, BLOCK_N, MASKING == PARTIAL, TMA)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def attend_ahead(
    acc,  # like in `attend`
    scores,  # [BLOCK_M, BLOCK_N] of the first tile
    first_k,  # position of the first tile
    next_block,  # block of the second tile
    row_max,
    row_sum,
    b_q,
    inner_q,
    k,
    v,
    scale,
    cap,
    row,
    masks,
    bias,
    MASKING: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    RELATIVE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Attend to the tiles of a pass by TMA; return the scores of the tile after them, or of the last one again."""
    BLOCK_D: tl.constexpr = b_q.shape[1]
    BLOCK_E: tl.constexpr = acc.shape[1]
    BLOCK_N: tl.constexpr = scores.shape[1]
    o_k = tl.arange(0, BLOCK_N)
    begin, end, last = steps_of_pass(row, MASKING)
    if RELATIVE and MASKING == FULL:
        row_max = tl.where(row_max == float("-inf"), tl.max(scores, 1), row_max)
    for i_step in tl.range(begin, end, disable_licm=True):  # keeps descriptors of resident tiles out of registers
        if CAPPED:
            scores = cap * tanh(scores / cap)
        if BIAS != "none":
            scores = scores * scale + pair_bias(bias, inner_q[:, None], (first_k + o_k)[None, :], BIAS)
        if MASKING == PARTIAL:
            entry, part = entry_of_step(i_step, row, MASKING, KV_BLOCK, BLOCK_N)
            mask_id = tl.load(row.tables.p_mask_ids + entry)
            lo, hi = load_band(masks, mask_id)
            is_full = i_step >= row.partial_tiles
            scores = where_shown(
                scores, float("-inf"), mask_id, lo, hi, is_full, masks, inner_q, part, first_k, k.seqlen,
                Q_BLOCK, KV_BLOCK,
            )  # fmt: skip
        if RELATIVE and MASKING == FULL:
            weights = tl.exp2(scores * (scale * LOG2E) - (row_max * (scale * LOG2E))[:, None])
            row_sum += tl.sum(weights, 1)
            # A use of acc that emits no instruction. Without it, Triton leaves the last product in flight across the
            # end of the loop, and ptxas then serializes the matrix instructions of the whole kernel.
            acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
        else:
            weights, rescale, row_max, row_sum = _softmax_step(
                scores, row_max, row_sum, scale if BIAS == "none" else 1.0, MASKING, False
            )
            if not OVERLAPPED:
                acc = acc * rescale[:, None]
        v_k = first_k
        if not OVERLAPPED:
            b_v = load_tile(v, v_k, o_k, BLOCK_E, BLOCK_E, BLOCK_N, True, True)
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc)
        _, part = entry_of_step(tl.minimum(i_step + 1, last), row, MASKING, KV_BLOCK, BLOCK_N)
        first_k = next_block * KV_BLOCK + part
        entry, _ = entry_of_step(tl.minimum(i_step + 2, last), row, MASKING, KV_BLOCK, BLOCK_N)
        next_block = tl.load(row.tables.p_indices + entry)
        b_k = load_tile(k, first_k, o_k, BLOCK_D, BLOCK_D, BLOCK_N, True, True)
        scores = tl.dot(b_q, tl.trans(b_k))
        if OVERLAPPED:
            b_v = load_tile(v, v_k, o_k, BLOCK_E, BLOCK_E, BLOCK_N, True, True)
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None])
    return acc, scores, first_k, next_block, row_max, row_sum
