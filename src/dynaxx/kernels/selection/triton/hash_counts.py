# SPDX-License-Identifier: Apache-2.0
"""Histograms of random-projection hashes per block: projections, signs and counts in one pass over the tensor.

Legend: B batch, N tokens, H heads, D head_dim, C blocks, T tables, P bits per table, padded to a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded, power_of_two
from dynaxx.kernels.runtime.arguments import strides_of, unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher

COLUMNS = 32  # projections processed together; more would not fit in registers


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen", "blocks", "heads"])
def _hash_counts_kernel(
    p_x,
    p_planes,  # (D, T * P) fp32, padded with zeros
    p_center,  # (B, H, D) fp32
    p_counts,  # (B, H, C, T << BITS) fp32, initially zero
    seqlen,
    blocks,
    heads,
    x_strides,
    SIZE: tl.constexpr,
    TABLES: tl.constexpr,
    BITS: tl.constexpr,
    P: tl.constexpr,
    AT_ONCE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    o_n = i_block * SIZE + tl.arange(0, SIZE)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_n < seqlen)[:, None] & (o_d < D)[None, :]
    p_x += i_bh // heads * x_strides.b + i_bh % heads * x_strides.h
    b_x = tl.load(p_x + o_n.to(tl.int64)[:, None] * x_strides.n + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    b_x -= tl.load(p_center + i_bh * D + o_d, mask=o_d < D, other=0.0)[None, :]
    place = 1 << tl.arange(0, P)
    p_counts += (i_bh * blocks + i_block) * (TABLES << BITS)
    for first in tl.static_range(0, TABLES, AT_ONCE):
        o_c = first * P + tl.arange(0, AT_ONCE * P)
        m_c = (o_c < TABLES * P)[None, :] & (o_d < D)[:, None]
        b_planes = tl.load(p_planes + o_d[:, None] * (TABLES * P) + o_c[None, :], mask=m_c, other=0.0)
        projected = tl.dot(b_x, b_planes, input_precision="tf32x3")  # [SIZE, AT_ONCE * P]
        signs = tl.reshape((projected > 0).to(tl.int32), [SIZE, AT_ONCE, P])
        bucket = tl.sum(signs * place[None, None, :], 2)
        o_t = first + tl.arange(0, AT_ONCE)
        counted = (o_n < seqlen)[:, None] & (o_t < TABLES)[None, :]
        tl.atomic_add(p_counts + (o_t << BITS)[None, :] + bucket, 1.0, mask=counted, sem="relaxed")


def hash_counts(x: Tensor, size: int, planes: Tensor, center: Tensor, tables: int, bits: int) -> Tensor:
    """Return how many tokens of each block fall into each bucket; sums of ones, so every run gives the same result.

    Args:
        x: (B, N, H, D).
        size: tokens per block, a power of two >= 16.
        planes: (D, tables * bits) fp32, the projections.
        center: (B, H, D) fp32, subtracted from every token.
        tables: number of hash tables.
        bits: bits per table.

    Returns:
        (B, H, ceil(N / size), tables * 2 ** bits) fp32; bit i of a bucket is the sign of the table's i-th projection.
    """
    batch, seqlen, heads, head_dim = x.shape
    blocks, wide = -(-seqlen // size), power_of_two(bits)
    counts = torch.zeros(batch, heads, blocks, tables << bits, device=x.device, dtype=torch.float32)
    if not counts.numel():
        return counts
    x = unit_stride(x)
    _hash_counts_kernel[(blocks, batch * heads)](
        x,
        torch.nn.functional.pad(planes.unflatten(-1, (tables, bits)), (0, wide - bits)).contiguous(),
        center.contiguous(),
        counts,
        seqlen=seqlen,
        blocks=blocks,
        heads=heads,
        x_strides=strides_of(x),
        SIZE=size,
        TABLES=tables,
        BITS=bits,
        P=wide,
        AT_ONCE=COLUMNS // wide,
        D=head_dim,
        BLOCK_D=padded(head_dim),
        num_warps=8,
    )
    return counts
