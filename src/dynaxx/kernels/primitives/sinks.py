# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on a GPU in one launch, which recordings of a call can repeat."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.primitives.numbers import exp_rounded
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.sinks import include_sinks as sinks_by_torch
from dynaxx.layout import BlockLayout

ROWS = 64  # queries per program


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen_q", "q_heads"])
def _include_sinks_kernel(
    p_out,  # (B, N, Hq, E) contiguous
    p_lse,  # (B, Hq, N) fp32, contiguous
    p_sinks,  # (Hq,)
    seqlen_q,
    q_heads,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scale out by sigmoid(lse - sink) and set lse to log(exp(lse) + exp(sink)), in place."""
    tiles = tl.cdiv(seqlen_q, ROWS)
    head = tl.program_id(0) // tiles
    i_b, i_h = (head // q_heads).to(tl.int64), head % q_heads
    o_q = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    p_row = p_lse + head.to(tl.int64) * seqlen_q + o_q
    lse = tl.load(p_row, mask=o_q < seqlen_q, other=float("-inf"))
    sink = tl.load(p_sinks + i_h).to(tl.float32)
    nothing = lse == float("-inf")
    apart = tl.where(nothing, 0.0, lse) - sink
    smaller = exp_rounded(-tl.abs(apart))  # the smaller of the two sums, in units of the larger one
    share = tl.where(apart >= 0, 1.0, smaller) / (1.0 + smaller)
    both = tl.maximum(lse, sink) + tl.log(1.0 + smaller)
    tl.debug_barrier()  # several warps load the same rows, which one of them overwrites
    tl.store(p_row, tl.where(nothing, sink, both), mask=o_q < seqlen_q)
    o_e = tl.arange(0, BLOCK_E)
    p_tile = p_out + ((i_b * seqlen_q + o_q) * q_heads + i_h)[:, None] * E + o_e[None, :]
    inside = (o_q < seqlen_q)[:, None] & (o_e < E)[None, :]
    out = tl.load(p_tile, mask=inside, other=0.0).to(tl.float32) * tl.where(nothing, 0.0, share)[:, None]
    tl.store(p_tile, out.to(p_out.dtype.element_ty), mask=inside)


def include_sinks(out: Tensor, lse: Tensor, sinks: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Like `kernels.sinks.include_sinks`, for results over `layout`: overwrite and return both."""
    if not out.is_contiguous():
        return sinks_by_torch(out, lse, sinks)
    if out.numel():
        record_or_replay(_start, layout, (out, lse, sinks))
    return out, lse


def _start(layout: BlockLayout, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    batch, seqlen_q, q_heads, head_dim = out.shape
    _include_sinks_kernel[(batch * q_heads * triton.cdiv(seqlen_q, ROWS),)](
        out,
        lse,
        sinks,
        seqlen_q=seqlen_q,
        q_heads=q_heads,
        E=head_dim,
        BLOCK_E=triton.next_power_of_2(head_dim),
        ROWS=ROWS,
    )
