# SPDX-License-Identifier: Apache-2.0
"""Per-query computations of the Hopper backward: lse and delta before the main kernels, dq from its sums after them.

    do, out, lse, dlse -> lse (base 2), delta, zeroed sums         sums of dq -> scale, reorder -> dq

Sums of dq are fp32, without the scale, by batch entry, head and tile of 64 rows. Within a tile they have the order in
which the two consumers of `backward_fused_consume` hold it: the columns' part of a power of two (`column_parts`), its
half, warp (16 rows), 8 columns, then the row and the pair of columns of a lane, and its two rows, 8 apart.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.attention.hopper.config import tile_width
from dynaxx.kernels.primitives.hopper.column_parts import columns_of
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
    p_sums,  # (B, Hq, padded_q, COLUMNS + REST) fp32 in any order
    seqlen_q,
    padded_q,
    q_heads,
    stride_dlb,
    stride_dlh,
    stride_dln,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    """Compute lse in base 2 and delta = rowsum(do * out) - dlse; inf and 0 for missing queries and empty rows.

    Also write zeros to the sums of dq, unless they have no COLUMNS.
    """
    p_sums += tl.program_id(0).to(tl.int64) * (BLOCK_M * (COLUMNS + REST))
    if COLUMNS > 0:
        tl.store(p_sums + tl.arange(0, BLOCK_M * COLUMNS), tl.zeros([BLOCK_M * COLUMNS], tl.float32))
    if REST > 0:
        tl.store(p_sums + BLOCK_M * COLUMNS + tl.arange(0, BLOCK_M * REST), tl.zeros([BLOCK_M * REST], tl.float32))
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


@triton.jit
def _add_columns(p_sums, desc, at, scale, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Write WIDTH columns of a tile of dq, from their sums, to `desc`; if ADD, add them, rounded."""
    BLOCK_M: tl.constexpr = desc.block_shape[2]
    HALVES: tl.constexpr = 2 if WIDTH >= 32 else 1
    sums = tl.load(p_sums + tl.arange(0, BLOCK_M * WIDTH))
    sums = tl.reshape(sums, [HALVES, BLOCK_M // 16, WIDTH // (8 * HALVES), 8, 4, 2, 2])
    sums = tl.reshape(tl.permute(sums, [1, 5, 3, 0, 2, 4, 6]), [1, 1, BLOCK_M, WIDTH])
    dq = (sums * scale).to(desc.dtype)
    if ADD:
        dq = (desc.load(at).to(tl.float32) + dq.to(tl.float32)).to(desc.dtype)
    desc.store(at, dq)


@kernel_launcher
@triton.jit(do_not_specialize=["padded_q", "q_heads"])
def _sparse_attention_hopper_bwd_sums_kernel(
    p_sums, dq_desc, rest_desc, padded_q, q_heads, scale, COLUMNS: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * sums, one tile per program; if ADD, add it, rounded, to dq."""
    tiles = padded_q // BLOCK_M
    head = tl.program_id(0) // tiles
    p_sums += tl.program_id(0).to(tl.int64) * (BLOCK_M * (COLUMNS + REST))
    row_q = tl.program_id(0) % tiles * BLOCK_M
    _add_columns(p_sums, dq_desc, [head // q_heads, head % q_heads, row_q, 0], scale, COLUMNS, ADD)
    if REST > 0:
        at = [head // q_heads, head % q_heads, row_q, COLUMNS]
        _add_columns(p_sums + BLOCK_M * COLUMNS, rest_desc, at, scale, REST, ADD)


class BackwardRows(NamedTuple):
    """The values that a backward kernel reads for each query, in addition to q and do."""

    lse: Tensor  # (B, Hq, q_blocks * q_block) fp32, base 2; inf for rows without weights
    delta: Tensor  # (B, Hq, q_blocks * q_block) fp32, rowsum(do * out) - dlse; 0 for rows without weights
    sums: Tensor | None  # sums of dq as lines of 32, (1, lines, 1, 32) fp32, zeroed; None for two passes


class BackwardCall(NamedTuple):
    """A backward pass over a layout, of (B, N, H, D) tensors that TMA can read."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    rows: BackwardRows
    layout: BlockLayout
    scale: float
    softcap: float | None = None


def rows_of(
    do: Tensor, out: Tensor, dlse: Tensor, lse: Tensor, layout: BlockLayout, head_dim: int, with_sums: bool
) -> BackwardRows:
    """Compute the rows of (B, N, H, Dv) tensors that TMA can read; `head_dim` is that of q."""
    rows = empty_rows(lse, layout)
    lse_log2, delta = rows[0], rows[1]
    sums = empty_sums(delta, head_dim) if with_sums else None
    tensors = (do, out, dlse, lse.contiguous(), lse_log2, delta)
    record_or_replay(_start_rows, layout, tensors if sums is None else (*tensors, sums), head_dim)
    return BackwardRows(lse_log2, delta, sums)


def empty_rows(lse: Tensor, layout: BlockLayout) -> Tensor:
    """Allocate lse and delta, (2, B, Hq, q_blocks * q_block) fp32."""
    return lse.new_empty(2, *lse.shape[:2], layout.q_blocks * layout.block_size[0])


def empty_sums(delta: Tensor, head_dim: int) -> Tensor:
    """Allocate the sums of dq."""
    return delta.new_empty(1, delta.numel() * columns_of(head_dim) // 32, 1, 32)


def parts_of_sums(head_dim: int) -> tuple[int, int]:
    """Return the columns of the first part of a tile of dq, and of the second; 0 if there is none."""
    columns = columns_of(head_dim)
    first = 1 << columns.bit_length() - 1
    return first, columns - first


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
    *sums_and_head_dim: Any,
) -> None:
    *given, head_dim = sums_and_head_dim
    sums = given[0] if given else None
    width = tile_width(head_dim)
    columns, rest = (0, 0) if sums is None else parts_of_sums(head_dim)
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
        COLUMNS=columns,
        REST=rest,
    )


def _start_sums(layout: BlockLayout, sums: Tensor, dq: Tensor, scale: float, add: bool) -> None:
    batch, _, q_heads, head_dim = dq.shape
    columns, rest = parts_of_sums(head_dim)
    padded_q = layout.q_blocks * layout.block_size[0]
    _sparse_attention_hopper_bwd_sums_kernel[(batch * q_heads * padded_q // ROWS,)](
        sums,
        tile_rows(dq, ROWS, columns),
        tile_rows(dq, ROWS, rest or columns),
        padded_q=padded_q,
        q_heads=q_heads,
        scale=scale,
        COLUMNS=columns,
        REST=rest,
        BLOCK_M=ROWS,
        ADD=add,
    )
