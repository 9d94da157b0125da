# SPDX-License-Identifier: Apache-2.0
"""Rows rounded to e4m3 on a GPU: one pass over memory, where the definition takes nine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels import rounding
from dynaxx.kernels.gpu.device import capability, power_of_two
from dynaxx.kernels.gpu.runtime.launcher import kernel_launcher

NUMBERS = 4096  # of a program
MOST_WIDTH = 1024
FIRST_CAPABILITY = (8, 9)  # with instructions for e4m3


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and the scale of each row, bitwise as `kernels.rounding.to_fp8` on a CPU."""
    width = x.shape[-1]
    if x.device.type != "cuda" or capability(x.device) < FIRST_CAPABILITY or width > MOST_WIDTH or not x.numel():
        return rounding.to_fp8(x)
    return round_rows(x)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `to_fp8` does, by the kernel."""
    width = x.shape[-1]
    x = x.contiguous()
    rounded = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block_w = power_of_two(width)
    _to_fp8_kernel[(triton.cdiv(scale.numel(), NUMBERS // block_w),)](
        x,
        rounded,
        scale,
        rows=scale.numel(),
        WIDTH=width,
        BLOCK_R=NUMBERS // block_w,
        BLOCK_W=block_w,
        MOST=rounding.MOST_FP8,
        LEAST=rounding.LEAST,
        num_warps=4,
    )
    return rounded, scale


@kernel_launcher
@triton.jit(do_not_specialize=["rows"])
def _to_fp8_kernel(
    p_x,  # (rows, WIDTH) contiguous
    p_rounded,  # (rows, WIDTH) e4m3
    p_scale,  # (rows,) fp32
    rows,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_w = tl.arange(0, BLOCK_W)
    inside = (row < rows)[:, None] & (o_w < WIDTH)[None, :]
    x = tl.load(p_x + row[:, None] * WIDTH + o_w[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(x)
    largest = tl.max(size, 1)
    missing = tl.max((size != size).to(tl.int32), 1) != 0
    scale = tl.where(missing, float("nan"), tl.div_rn(tl.maximum(largest, LEAST * MOST), MOST))
    rounded = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    tl.store(p_rounded + row[:, None] * WIDTH + o_w[None, :], rounded.to(tl.float8e4nv), mask=inside)
    tl.store(p_scale + row, scale, mask=row < rows)
