# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Mean keys (and values) of windows of tokens, and their gradient, where sequences are alike.

B sequences of N tokens, each with L windows of WINDOW tokens, STRIDE apart; H heads of D. x is (B * N, H, D), the means
(B * L, H, D). Sums are fp32, in one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.launch import unit_stride
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.native_union import gather_rows, scatter_rows
from dynaxx.layout.native import NativeSpans

ROWS = 32
SIZES = ["rows", "tokens", "windows", "heads"]


@light_launch
@triton.jit(do_not_specialize=SIZES)
def _means_fwd_kernel(
    p_x, p_out, rows, tokens, windows, heads, stride_n, stride_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = row < rows
    first = row // windows * tokens + row % windows * STRIDE
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(WINDOW):
        acc += gather_rows(p_x, first + i, first * 0 + head, stride_n, stride_h, inside, D, BLOCK_D)
    scatter_rows(p_out, acc / WINDOW, row, row * 0 + head, heads * D, D, inside, D, BLOCK_D)


@light_launch
@triton.jit(do_not_specialize=SIZES)
def _means_bwd_kernel(
    p_do, p_dx, rows, tokens, windows, heads, stride_n, stride_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = row < rows
    position, base = row % tokens, row // tokens * windows
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in tl.static_range(WINDOW // STRIDE):  # the windows that hold a token are neighbours
        window = position // STRIDE - i
        holds = inside & (window >= 0) & (window < windows)
        acc += gather_rows(p_do, base + window, row * 0 + head, stride_n, stride_h, holds, D, BLOCK_D)
    scatter_rows(p_dx, acc / WINDOW, row, row * 0 + head, heads * D, D, inside, D, BLOCK_D)


def means_forward(x: Tensor, spans: NativeSpans) -> Tensor:
    """As `kernels.reference.native.compression_means`, of sequences that are alike."""
    alike = spans.uniform
    assert alike is not None, "sequences of unequal lengths have no closed form"
    out = x.new_empty(spans.ends_cmp[-1], *x.shape[1:])
    return _launch(_means_fwd_kernel, unit_stride(x), out, alike[2], spans)


def means_backward(do: Tensor, spans: NativeSpans) -> Tensor:
    """The gradient of x, (B * N, H, D)."""
    alike = spans.uniform
    assert alike is not None, "sequences of unequal lengths have no closed form"
    dx = do.new_empty(spans.ends_k[-1], *do.shape[1:])
    if not do.shape[0]:
        return torch.zeros_like(dx)
    return _launch(_means_bwd_kernel, unit_stride(do), dx, alike[2], spans)


def _launch(kernel, x: Tensor, out: Tensor, tokens: int, spans: NativeSpans) -> Tensor:
    rows, heads, dim = out.shape
    if rows:
        kernel[(-(-rows // ROWS), heads)](
            x,
            out,
            rows=rows,
            tokens=tokens,
            windows=spans.sizes.compressed(tokens),
            heads=heads,
            stride_n=x.stride(0),
            stride_h=x.stride(1),
            D=dim,
            BLOCK_D=padded(dim),
            WINDOW=spans.sizes.cmp_block,
            STRIDE=spans.sizes.cmp_stride,
            ROWS=ROWS,
            num_warps=4,
        )
    return out
