# SPDX-License-Identifier: Apache-2.0
"""Helpers for rows in the kernels of selected attention: loads, stores, softmax weights, and per-row backward inputs.

Legend: T queries, Hq q heads, E head_dim of v.
"""

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.primitives.numbers import LOG2E, exp_rounded
from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.runtime.launcher import kernel_launcher


@triton.jit
def gather_rows(p_base, first, second, strides, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return [len(first), BLOCK_DIM] rows at first * strides[0] + second * strides[1]; zero if not inside."""
    o_d = tl.arange(0, BLOCK_DIM)
    offsets = first.to(tl.int64) * strides[0] + second.to(tl.int64) * strides[1]
    mask = inside[:, None] & (o_d < DIM)[None, :]
    return tl.load(p_base + offsets[:, None] + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def scatter_rows(p_base, rows, first, second, strides, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Store rows at the addresses that `gather_rows` would load from, in the pointer's dtype."""
    o_d = tl.arange(0, BLOCK_DIM)
    offsets = first.to(tl.int64) * strides[0] + second.to(tl.int64) * strides[1]
    mask = inside[:, None] & (o_d < DIM)[None, :]
    tl.store(p_base + offsets[:, None] + o_d[None, :], rows.to(p_base.dtype.element_ty), mask=mask)


@triton.jit
def block_rows(p_base, start, keys, stride, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return [BLOCK_N, BLOCK_DIM] rows of one head, starting at key row `start`; zero past the last key."""
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DIM)
    mask = (start + o_n < keys)[:, None]
    if DIM < BLOCK_DIM:
        mask = mask & (o_d < DIM)[None, :]
    p_rows = p_base + start.to(tl.int64) * stride + (o_n.to(tl.int64)[:, None] * stride + o_d[None, :])
    return tl.load(p_rows, mask=mask, other=0.0)


@triton.jit
def softmax_step(scores, row_max, scale, EXACT: tl.constexpr):
    """Return the new maximum, the factor for earlier sums, and the weights of unscaled scores, where -inf is hidden."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if EXACT:
        rescale = exp_rounded((row_max - shift) * scale)
        weights = exp_rounded((scores - shift[:, None]) * scale)
    else:
        rescale = tl.exp2((row_max - shift) * (scale * LOG2E))
        weights = tl.exp2(scores * (scale * LOG2E) - (shift * (scale * LOG2E))[:, None])
    return new_max, rescale, weights


@triton.jit
def weights_of(scores, lse, scale, EXACT: tl.constexpr):
    """Return exp(scores * scale - lse); rows with lse = inf get zero weights. Broadcasts."""
    weights = exp_rounded(scores * scale - lse) if EXACT else tl.exp2(scores * (scale * LOG2E) - lse * LOG2E)
    return weights


@triton.jit
def row_values(p_rows, at, inside):
    """Return lse and delta of rows `at` of `row_pairs`; invalid rows get lse = inf, so that their weights are zero.

    Load both values at once: with fewer elements than threads, Triton repeats a load for every layout that uses it.
    """
    pair = tl.arange(0, 2)[None, :]
    pairs = tl.load(p_rows + at.to(tl.int64)[:, None] * 2 + pair, mask=inside[:, None], other=float("inf"))
    lse, delta = tl.split(pairs)
    return lse, tl.where(inside, delta, 0.0)


@kernel_launcher
@triton.jit(do_not_specialize=["rows", "q_heads", "queries"])
def _selected_rows_kernel(
    p_do,
    p_out,  # (T, Hq, E)
    p_lse,  # (Hq, T) contiguous
    p_dlse,
    p_rows,  # (T, Hq, 2) fp32
    rows,  # T * Hq
    queries,
    q_heads,
    do_strides,
    out_strides,
    stride_dlh,
    stride_dln,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    t, h = row // q_heads, row % q_heads
    b_do = gather_rows(p_do, t, h, do_strides, inside, E, BLOCK_E).to(tl.float32)
    b_out = gather_rows(p_out, t, h, out_strides, inside, E, BLOCK_E).to(tl.float32)
    lse = tl.load(p_lse + h * queries + t, mask=inside, other=float("-inf"))
    dlse = tl.load(p_dlse + h * stride_dlh + t * stride_dln, mask=inside, other=0.0).to(tl.float32)
    empty = lse == float("-inf")
    tl.store(p_rows + row * 2, tl.where(empty, float("inf"), lse), mask=inside)
    tl.store(p_rows + row * 2 + 1, tl.where(empty, 0.0, tl.sum(b_do * b_out, 1) - dlse), mask=inside)


def row_pairs(do: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return (T, Hq, 2) fp32: lse, and delta = rowsum(do * out) - dlse; inf and 0 for a row that sees nothing.

    Args:
        do: (T, Hq, E), with a dense last dimension.
        dlse: (Hq, T).
        out: (T, Hq, E).
        lse: (Hq, T).
    """
    rows = lse.new_empty(*out.shape[:2], 2)
    _selected_rows_kernel[(triton.cdiv(out.shape[0] * out.shape[1], 32),)](
        do,
        out,
        lse.contiguous(),
        dlse,
        rows,
        rows=out.shape[0] * out.shape[1],
        queries=out.shape[0],
        q_heads=out.shape[1],
        do_strides=packed_strides_of(do),
        out_strides=packed_strides_of(out),
        stride_dlh=dlse.stride(0),
        stride_dln=dlse.stride(1),
        E=out.shape[2],
        BLOCK_E=padded(out.shape[2]),
        ROWS=32,
        num_warps=4,
    )
    return rows
