# SPDX-License-Identifier: Apache-2.0
"""Rows rounded to 8 bits on a GPU: one pass over memory, where the definitions take nine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels import rounding
from dynaxx.kernels.device import gpu_of, power_of_two
from dynaxx.kernels.runtime.launcher import kernel_launcher

NUMBERS = 4096  # of a program
MAX_WIDTH = 1024
WHOLE_ABOVE = tl.constexpr(1.5 * 2**23)  # the sum with it of a number up to 2**22 has no digits behind the point


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and the scale of each row, bitwise as `kernels.rounding.to_fp8` on a CPU."""
    return round_rows(x, torch.float8_e4m3fn) if _serves(x) else rounding.to_fp8(x)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in bf16, which holds them, and the scale of each row, as `kernels.rounding.to_int8` does."""
    return round_rows(x, torch.bfloat16) if _serves(x) else rounding.to_int8(x)


def _serves(x: Tensor) -> bool:
    """Return whether the kernel rounds these rows."""
    on_gpu = x.device.type == "cuda" and gpu_of(x.device).has_e4m3
    return on_gpu and 0 < x.shape[-1] <= MAX_WIDTH and x.numel() > 0


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `to_fp8` does, or `to_int8` if dtype is bf16, by the kernel."""
    width, whole = x.shape[-1], dtype == torch.bfloat16
    x = x.contiguous()
    rounded = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block_w = power_of_two(width)
    _round_rows_kernel[(triton.cdiv(scale.numel(), NUMBERS // block_w),)](
        x,
        rounded,
        scale,
        rows=scale.numel(),
        WIDTH=width,
        BLOCK_R=NUMBERS // block_w,
        BLOCK_W=block_w,
        MOST=127.0 if whole else rounding.MAX_FP8,
        LEAST=rounding.LEAST if whole else rounding.LEAST * rounding.MAX_FP8,
        WHOLE=whole,
        num_warps=4,
    )
    return rounded, scale


@kernel_launcher
@triton.jit(do_not_specialize=["rows"])
def _round_rows_kernel(
    p_x,  # (rows, WIDTH) contiguous
    p_rounded,  # (rows, WIDTH) e4m3, or bf16
    p_scale,  # (rows,) fp32
    rows,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,  # that the largest number of a row counts as
    WHOLE: tl.constexpr,  # round to whole numbers, ties to even
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_w = tl.arange(0, BLOCK_W)
    inside = (row < rows)[:, None] & (o_w < WIDTH)[None, :]
    x = tl.load(p_x + row[:, None] * WIDTH + o_w[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(x)
    largest = tl.max(size, 1)
    missing = tl.max((size != size).to(tl.int32), 1) != 0
    scale = tl.where(missing, float("nan"), tl.div_rn(tl.maximum(largest, LEAST), MOST))
    rounded = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if WHOLE:
        rounded = (rounded + WHOLE_ABOVE) - WHOLE_ABOVE
    tl.store(p_rounded + row[:, None] * WIDTH + o_w[None, :], rounded.to(p_rounded.dtype.element_ty), mask=inside)
    tl.store(p_scale + row, scale, mask=row < rows)
