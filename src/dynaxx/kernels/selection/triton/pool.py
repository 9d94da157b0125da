# SPDX-License-Identifier: Apache-2.0
"""Summaries of blocks of tokens: mean, minimum or maximum, each in one pass over the tensor.

Legend: B batch, N tokens, H heads, D head_dim, C blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded, power_of_two
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher

MEAN = tl.constexpr(0)
SMALLEST = tl.constexpr(1)
LARGEST = tl.constexpr(2)
KINDS = {"mean": 0, "smallest": 1, "largest": 2}


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen", "blocks", "heads"])
def _pool_kernel(
    p_x,
    p_out,  # (B, H, C, D) contiguous
    seqlen,
    blocks,
    heads,
    scale,
    x_strides,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_h = (tl.program_id(1) % heads).to(tl.int64)
    i_b = (tl.program_id(1) // heads).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_x += i_b * x_strides.b + i_h * x_strides.h
    other = 0.0 if KIND == MEAN else (float("inf") if KIND == SMALLEST else float("-inf"))
    found = tl.full([BLOCK_D], other, tl.float32)
    for first in tl.static_range(0, SIZE, TILE):
        o_n = i_block.to(tl.int64) * SIZE + first + tl.arange(0, TILE)
        inside = ((o_n < seqlen) & (first + tl.arange(0, TILE) < SIZE))[:, None] & m_d[None, :]
        x = tl.load(p_x + o_n[:, None] * x_strides.n + o_d[None, :], mask=inside, other=other).to(tl.float32)
        if KIND == MEAN:
            found += tl.sum(x, 0)
        elif KIND == SMALLEST:
            found = tl.minimum(found, tl.min(x, 0))
        else:
            found = tl.maximum(found, tl.max(x, 0))
    if KIND == MEAN:
        found = found / tl.minimum(SIZE, seqlen - i_block * SIZE)
    tl.store(p_out + (tl.program_id(1).to(tl.int64) * blocks + i_block) * D + o_d, found * scale, mask=m_d)


def pool_blocks(x: Tensor, size: int, kind: str, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (B, H, ceil(N / size), D) of x (B, N, H, D): "mean", "smallest" or "largest" of `size` tokens, scaled."""
    batch, seqlen, heads, head_dim = x.shape
    blocks = -(-seqlen // size)
    out = torch.empty(batch, heads, blocks, head_dim, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = unit_stride(x)
    _pool_kernel[(blocks, batch * heads)](
        x,
        out,
        seqlen=seqlen,
        blocks=blocks,
        heads=heads,
        scale=float(scale),
        x_strides=strides_of(x),
        KIND=KINDS[kind],
        SIZE=size,
        TILE=min(32, power_of_two(size)),
        D=head_dim,
        BLOCK_D=padded(head_dim),
        num_warps=1,  # bytes in flight matter, not threads: 2.5 times as fast as four warps on an H200
    )
    return out
