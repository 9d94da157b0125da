# SPDX-License-Identifier: Apache-2.0
"""Per-query computations of the Hopper backward: lse and delta before the main kernels, dq from its sums after them.

    do, out, lse, dlse -> lse (base 2), delta, zeroed sums         sums of dq -> scale, reorder -> dq

Sums of dq are fp32, without the scale, by batch entry, head and tile of 64 rows. Within a tile they have the order in
which the two consumers of `backward_fused_consume` hold it: consumer (half of the columns), warp (16 rows), 8 columns,
then the row and the pair of columns of a lane, and its two rows, 8 apart.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.attention.hopper.config import tile_width
from dynaxx.kernels.primitives.numbers import LOG2E
from dynaxx.kernels.runtime.arguments import tile_rows
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockLayout

ROWS = 64  # rows per tile


@kernel_launcher
@triton.jit(do_not_specialize=["seqlen_q", "padded_q", "q_heads", "stride_dlb", "stride_dlh", "stride_dln"])
def _sparse_attention_hopper_bwd_rows_kernel(
    do_desc,
    out_desc,
    p_dlse,
    p_lse,
    p_lse_log2,  # (B, Hq, padded_q) fp32
    p_delta,  # (B, Hq, padded_q) fp32
    p_sums,  # (B, Hq, padded_q, D) fp32 in any order, if ZERO
    seqlen_q,
    padded_q,
    q_heads,
    stride_dlb,
    stride_dlh,
    stride_dln,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Compute lse in base 2 and delta = rowsum(do * out) - dlse; inf and 0 for missing queries and empty rows.

    If ZERO, also write zeros to the sums of dq.
    """
    if ZERO:
        at_sums = tl.program_id(0).to(tl.int64) * (BLOCK_M * D) + tl.arange(0, BLOCK_M * D)
        tl.store(p_sums + at_sums, tl.zeros([BLOCK_M * D], tl.float32))
    tiles = padded_q // BLOCK_M
    head = tl.program_id(0) // tiles
    row_q = tl.program_id(0) % tiles * BLOCK_M
    i_b, i_h = head // q_heads, head % q_heads
    pos_q = row_q + tl.arange(0, BLOCK_M)
    inside = pos_q < seqlen_q
    b_do = do_desc.load([i_b, i_h, row_q, 0]).reshape(BLOCK_M, D).to(tl.float32)
    b_out = out_desc.load([i_b, i_h, row_q, 0]).reshape(BLOCK_M, D).to(tl.float32)
    p_row = p_dlse + i_b.to(tl.int64) * stride_dlb + i_h.to(tl.int64) * stride_dlh + pos_q.to(tl.int64) * stride_dln
    dlse = tl.load(p_row, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(p_lse + head.to(tl.int64) * seqlen_q + pos_q, mask=inside, other=float("-inf"))
    empty = lse == float("-inf")
    at = head.to(tl.int64) * padded_q + pos_q
    tl.store(p_lse_log2 + at, tl.where(empty, float("inf"), lse * LOG2E))
    tl.store(p_delta + at, tl.where(empty, 0.0, tl.sum(b_do * b_out, 1) - dlse))


@kernel_launcher
@triton.jit(do_not_specialize=["padded_q", "q_heads"])
def _sparse_attention_hopper_bwd_sums_kernel(
    p_sums, dq_desc, padded_q, q_heads, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, ADD: tl.constexpr
):
    """Compute dq = scale * sums, one tile per program; if ADD, add it, rounded, to dq."""
    tiles = padded_q // BLOCK_M
    head = tl.program_id(0) // tiles
    at = tl.program_id(0).to(tl.int64) * (BLOCK_M * D) + tl.arange(0, BLOCK_M * D)
    sums = tl.reshape(tl.load(p_sums + at), [2, BLOCK_M // 16, D // 16, 8, 4, 2, 2])
    sums = tl.reshape(tl.permute(sums, [1, 5, 3, 0, 2, 4, 6]), [1, 1, BLOCK_M, D])
    row_q = tl.program_id(0) % tiles * BLOCK_M
    at_tile = [head // q_heads, head % q_heads, row_q, 0]
    dq = (sums * scale).to(dq_desc.dtype)
    if ADD:
        dq = (dq_desc.load(at_tile).to(tl.float32) + dq.to(tl.float32)).to(dq_desc.dtype)
    dq_desc.store(at_tile, dq)


class BackwardRows(NamedTuple):
    """The values that a backward kernel reads for each query, in addition to q and do."""

    lse: Tensor  # (B, Hq, q_blocks * q_block) fp32, base 2; inf for rows without weights
    delta: Tensor  # (B, Hq, q_blocks * q_block) fp32, rowsum(do * out) - dlse; 0 for rows without weights
    sums: Tensor | None  # sums of dq as lines of 32, (1, lines, 1, 32) fp32, zeroed; None for two passes


def rows_of(
    do: Tensor, out: Tensor, dlse: Tensor, lse: Tensor, layout: BlockLayout, width: int, with_sums: bool
) -> BackwardRows:
    """Compute the rows of (B, N, H, D) tensors that TMA can read, in tiles of `width` columns."""
    rows = empty_rows(lse, layout)
    lse_log2, delta = rows[0], rows[1]
    sums = empty_sums(delta, width) if with_sums else None
    tensors = (do, out, dlse, lse.contiguous(), lse_log2, delta)
    record_or_replay(_start_rows, layout, tensors if sums is None else (*tensors, sums), width)
    return BackwardRows(lse_log2, delta, sums)


def empty_rows(lse: Tensor, layout: BlockLayout) -> Tensor:
    """Allocate lse and delta, (2, B, Hq, q_blocks * q_block) fp32."""
    return lse.new_empty(2, *lse.shape[:2], layout.q_blocks * layout.block_size[0])


def empty_sums(delta: Tensor, width: int) -> Tensor:
    """Allocate the sums of dq for tiles of `width` columns."""
    return delta.new_empty(1, delta.numel() * width // 32, 1, 32)


def dq_of_sums(sums: Tensor, q: Tensor, layout: BlockLayout, scale: float, others: Tensor | None = None) -> Tensor:
    """Return dq, contiguous; if `others` is given, add dq to it in place."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if others is None else others
    record_or_replay(_start_sums, layout, (sums, dq), scale, others is not None)
    return dq


def _start_rows(
    layout: BlockLayout,
    do: Tensor,
    out: Tensor,
    dlse: Tensor,
    lse: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    *sums_and_width: Any,
) -> None:
    *given, width = sums_and_width
    sums = given[0] if given else None
    batch, q_heads, padded_q = delta.shape
    _sparse_attention_hopper_bwd_rows_kernel[(batch * q_heads * padded_q // ROWS,)](
        tile_rows(do, ROWS, width),
        tile_rows(out, ROWS, width),
        dlse,
        lse,
        lse_log2,
        delta,
        delta if sums is None else sums,
        seqlen_q=do.shape[1],
        padded_q=padded_q,
        q_heads=q_heads,
        stride_dlb=dlse.stride(0),
        stride_dlh=dlse.stride(1),
        stride_dln=dlse.stride(2),
        D=width,
        BLOCK_M=ROWS,
        ZERO=sums is not None,
    )


def _start_sums(layout: BlockLayout, sums: Tensor, dq: Tensor, scale: float, add: bool) -> None:
    batch, _, q_heads, head_dim = dq.shape
    width = tile_width(head_dim)
    padded_q = layout.q_blocks * layout.block_size[0]
    _sparse_attention_hopper_bwd_sums_kernel[(batch * q_heads * padded_q // ROWS,)](
        sums,
        tile_rows(dq, ROWS, width),
        padded_q=padded_q,
        q_heads=q_heads,
        scale=scale,
        D=width,
        BLOCK_M=ROWS,
        ADD=add,
    )
