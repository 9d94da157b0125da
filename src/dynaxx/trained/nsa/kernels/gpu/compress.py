# SPDX-License-Identifier: Apache-2.0
"""Pooling of windows of tokens to their mean or a weighted sum, with gradients, for sequences of equal length.

Legend: B sequences of N tokens; each has L windows of WINDOW tokens that start STRIDE tokens apart; H heads of head_dim
D. x is (B * N, H, D), pooled tokens are (B * L, H, D), weights (WINDOW, H). Sums are in fp32, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.trained.nsa.kernels.gpu.rows import gather_rows, scatter_rows
from dynaxx.trained.nsa.spans import NsaSpans

ROWS = 32
FORWARD_ROWS = 8  # with 32, the kernel reads at two thirds of the speed
PARTS = 64  # programs that share the gradient of one weight
SIZES = ["rows", "tokens", "windows", "heads"]


@triton.jit
def _weight(p_weight, at, head, heads, WINDOW: tl.constexpr, WEIGHTED: tl.constexpr):
    """Return the weights at positions `at` of a window."""
    if WEIGHTED:
        return tl.load(p_weight + at * heads + head).to(tl.float32)
    return at * 0.0 + 1.0 / WINDOW


@triton.jit
def _tile_of(rows, ROWS: tl.constexpr):
    """Return the rows of a program, their head, and which rows exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(1), row < rows


@kernel_launcher
@triton.jit(do_not_specialize=SIZES)
def _pool_fwd_kernel(
    p_x, p_weight, p_out, rows, tokens, windows, heads, strides, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, head, inside = _tile_of(rows, ROWS)
    first = row // windows * tokens + row % windows * STRIDE
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(WINDOW):
        b_x = gather_rows(p_x, first + i, first * 0 + head, strides, inside, D, BLOCK_D)
        acc += b_x.to(tl.float32) * _weight(p_weight, i, head, heads, WINDOW, WEIGHTED)
    scatter_rows(p_out, acc, row, row * 0 + head, (heads * D, D), inside, D, BLOCK_D)


@kernel_launcher
@triton.jit(do_not_specialize=SIZES)
def _pool_bwd_kernel(
    p_do, p_weight, p_dx, rows, tokens, windows, heads, strides, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, head, inside = _tile_of(rows, ROWS)
    position, base = row % tokens, row // tokens * windows
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in tl.static_range(WINDOW // STRIDE):  # the windows that contain a token are neighbours
        window = position // STRIDE - i
        holds = inside & (window >= 0) & (window < windows)
        b_do = gather_rows(p_do, base + window, row * 0 + head, strides, holds, D, BLOCK_D)
        weight = _weight(p_weight, position % STRIDE + i * STRIDE, head, heads, WINDOW, WEIGHTED)
        acc += b_do.to(tl.float32) * weight[:, None]
    scatter_rows(p_dx, acc, row, row * 0 + head, (heads * D, D), inside, D, BLOCK_D)


@kernel_launcher
@triton.jit(do_not_specialize=SIZES)
def _pool_bwd_weight_kernel(
    p_do, p_x, p_parts, rows, tokens, windows, heads, do_strides, x_strides,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum every num_programs-th tile of windows into the gradient of one weight: (programs, WINDOW, H) fp32."""
    part, at, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    acc = tl.zeros([ROWS], tl.float32)
    for begin in range(part * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = row < rows
        token = row // windows * tokens + row % windows * STRIDE + at
        b_do = gather_rows(p_do, row, row * 0 + head, do_strides, inside, D, BLOCK_D).to(tl.float32)
        b_x = gather_rows(p_x, token, row * 0 + head, x_strides, inside, D, BLOCK_D).to(tl.float32)
        acc += tl.sum(b_do * b_x, 1)
    tl.store(p_parts + (part * tl.num_programs(1) + at) * heads + head, tl.sum(acc, 0))


def pool_forward(x: Tensor, weight: Tensor | None, spans: NsaSpans) -> Tensor:
    """Return the windows of equally long sequences, each as its mean or its sum weighted by `weight` (WINDOW, H)."""
    out = x.new_empty(spans.ends_cmp[-1], *x.shape[1:])
    return _launch(_pool_fwd_kernel, x, weight, out, spans, FORWARD_ROWS)


def pool_backward(do: Tensor, x: Tensor, weight: Tensor | None, spans: NsaSpans) -> tuple[Tensor, Tensor | None]:
    """Return dx (B * N, H, D) and dweight, which is None for means."""
    dx = do.new_empty(x.shape)
    if not do.shape[0]:
        return dx.zero_(), None if weight is None else torch.zeros_like(weight)
    _launch(_pool_bwd_kernel, do, weight, dx, spans, ROWS)
    if weight is None:
        return dx, None
    do, x = unit_stride(do), unit_stride(x)
    rows, heads, dim = do.shape
    sizes, tokens = spans.sizes, _tokens(spans)
    programs = min(PARTS, -(-rows // ROWS))
    parts = do.new_empty(programs, sizes.cmp_block, heads, dtype=torch.float32)
    _pool_bwd_weight_kernel[(programs, sizes.cmp_block, heads)](
        do,
        x,
        parts,
        rows=rows,
        tokens=tokens,
        windows=sizes.compressed(tokens),
        heads=heads,
        do_strides=packed_strides_of(do),
        x_strides=packed_strides_of(x),
        D=dim,
        BLOCK_D=padded(dim),
        STRIDE=sizes.cmp_stride,
        ROWS=ROWS,
        num_warps=4,
    )
    return dx, parts.sum(0).to(weight.dtype)


def _tokens(spans: NsaSpans) -> int:
    """Return the number of tokens per sequence."""
    equal = spans.equal_lengths
    assert equal is not None, "sequences of unequal lengths have no closed form"
    return equal.seqlen_k


def _launch(kernel, x: Tensor, weight: Tensor | None, out: Tensor, spans: NsaSpans, tile: int) -> Tensor:
    rows, heads, dim = out.shape
    x, tokens = unit_stride(x), _tokens(spans)
    if rows:
        kernel[(-(-rows // tile), heads)](
            x,
            x if weight is None else weight.contiguous(),
            out,
            rows=rows,
            tokens=tokens,
            windows=spans.sizes.compressed(tokens),
            heads=heads,
            strides=packed_strides_of(x),
            D=dim,
            BLOCK_D=padded(dim),
            WINDOW=spans.sizes.cmp_block,
            STRIDE=spans.sizes.cmp_stride,
            WEIGHTED=weight is not None,
            ROWS=tile,
            num_warps=4,
        )
    return out
