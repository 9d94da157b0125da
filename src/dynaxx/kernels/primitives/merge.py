# SPDX-License-Identifier: Apache-2.0
"""Merge attention results over two disjoint sets of keys on a GPU, in one launch and in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.primitives.numbers import exp_rounded
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockLayout

ROWS = 32  # queries per program


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen_q", "q_heads"])
def _merge_kernel(
    p_out,  # (B, N, Hq, E)
    p_lse,  # (B, Hq, N) fp32, contiguous
    p_other,  # (B, N, Hq, E) contiguous
    p_other_lse,  # (B, Hq, N) fp32, contiguous
    stride_b,
    stride_n,
    stride_h,
    seqlen_q,
    q_heads,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, ROWS)
    head = tl.program_id(0) // tiles
    i_b, i_h = (head // q_heads).to(tl.int64), head % q_heads
    o_q = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    row = head.to(tl.int64) * seqlen_q + o_q
    lse = tl.load(p_lse + row, mask=o_q < seqlen_q, other=float("-inf"))
    other_lse = tl.load(p_other_lse + row, mask=o_q < seqlen_q, other=float("-inf"))
    most = tl.maximum(lse, other_lse)
    nothing = most == float("-inf")
    most = tl.where(nothing, 0.0, most)
    tl.debug_barrier()  # several warps load the same rows, which one of them overwrites
    weight, other_weight = exp_rounded(lse - most), exp_rounded(other_lse - most)
    total = tl.where(nothing, 1.0, weight + other_weight)
    tl.store(p_lse + row, tl.where(nothing, float("-inf"), most + tl.log(total)), mask=o_q < seqlen_q)
    inside = (o_q < seqlen_q)[:, None] & (o_e < E)[None, :]
    p_tile = p_out + i_b * stride_b + o_q.to(tl.int64)[:, None] * stride_n + i_h.to(tl.int64) * stride_h + o_e[None, :]
    p_other_tile = p_other + ((i_b * seqlen_q + o_q) * q_heads + i_h)[:, None] * E + o_e[None, :]
    out = tl.load(p_tile, mask=inside, other=0.0).to(tl.float32) * (weight / total)[:, None]
    out += tl.load(p_other_tile, mask=inside, other=0.0).to(tl.float32) * (other_weight / total)[:, None]
    tl.store(p_tile, out.to(p_out.dtype.element_ty), mask=inside)


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, layout: BlockLayout) -> None:
    """Overwrite `out` and `lse` with the result over the keys of both.

    Args:
        out: (B, N, Hq, E) with contiguous rows, in any floating dtype.
        lse: (B, Hq, N) fp32, contiguous.
        other: (B, N, Hq, E) contiguous, the result over other keys.
        other_lse: like `lse`.
        layout: one of the layouts, with which launches are kept.
    """
    if out.numel():
        record_or_replay(_start, layout, (out, lse, other, other_lse))


def _start(layout: BlockLayout, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    batch, seqlen_q, q_heads, head_dim = out.shape
    _merge_kernel[(batch * q_heads * triton.cdiv(seqlen_q, ROWS),)](
        out,
        lse,
        other,
        other_lse,
        *out.stride()[:3],
        seqlen_q=seqlen_q,
        q_heads=q_heads,
        E=head_dim,
        BLOCK_E=triton.next_power_of_2(head_dim),
        ROWS=ROWS,
    )
