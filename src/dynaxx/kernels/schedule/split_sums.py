# SPDX-License-Identifier: Apache-2.0
"""Combination of the parts of split lines, in a fixed order: gradients are added, outputs are merged."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.split import SplitLines
from dynaxx.layout import BlockLayout

TILE = 8  # rows per program
AT_ONCE = 8  # parts that a program reads at a time
PIECE_TILE = 16  # rows per program of `sum_pieces`


@kernel_launcher
@triton.jit(do_not_specialize=["num_lines", "seqlen", "heads", "batch_copies", "head_copies", "part_stride"])
def _sum_parts_kernel(
    p_sums,  # (slots, ...) fp32: the [BLOCK, D] sums of each part, `part_stride` apart
    p_out,  # (B, seqlen, heads, D) contiguous
    p_lines,
    num_lines,
    seqlen,
    heads,
    batch_copies,
    head_copies,
    part_stride,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute out = scale * the sum of a split line's parts, added in order."""
    TILES: tl.constexpr = BLOCK // TILE
    copies = batch_copies * head_copies
    i_copy = tl.program_id(0) // TILES % copies
    p_line = p_lines + tl.program_id(0) // (TILES * copies) * 3
    line, first, count = tl.load(p_line), tl.load(p_line + 1), tl.load(p_line + 2)
    i_row, layout_head = line % num_lines, line // num_lines
    line_heads = heads // head_copies
    i_h = layout_head % line_heads + i_copy % head_copies
    i_b = layout_head // line_heads + i_copy // head_copies
    inner = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, BLOCK_D)
    at = inner[:, None] * D + o_d[None, :]
    inside = (inner >= 0)[:, None] & (o_d < D)[None, :]
    total = tl.zeros([TILE, BLOCK_D], tl.float32)
    for i in range(0, count, AT_ONCE):
        part = i + tl.arange(0, AT_ONCE)
        slot = ((first + part) * copies + i_copy).to(tl.int64)
        p_part = p_sums + slot[:, None, None] * part_stride + at[None, :, :]
        total += tl.sum(tl.load(p_part, mask=(part < count)[:, None, None] & inside[None, :, :], other=0.0), 0)
    position = i_row * BLOCK + inner
    p_row = p_out + ((i_b.to(tl.int64) * seqlen + position) * heads + i_h)[:, None] * D + o_d[None, :]
    stored = inside & (position < tl.where(count > 0, seqlen, 0))[:, None]
    tl.store(p_row, (total * scale).to(p_out.dtype.element_ty), mask=stored)


def of_columns(sums: Tensor, head_dim: int) -> Tensor:
    """Return the first `head_dim` columns of the parts' results as dense rows; tiles may be wider."""
    return sums if sums.shape[-1] == head_dim else sums[..., :head_dim].contiguous()


def sum_parts(
    sums: Tensor, out: Tensor, split: SplitLines, layout: BlockLayout, block: int, scale: float = 1.0
) -> None:
    """Write `scale` times the sum of the parts to the blocks of the split lines in `out`, (B, N, H, D) contiguous.

    Args:
        sums: (slots, block, D) fp32 with dense rows, the results of the parts.
        out: output, in any dtype.
        split: the split lines.
        layout: the layout whose lines they are.
        block: rows per line.
        scale: factor.
    """
    record_or_replay(_start_sum, layout, (sums, out, split.lines), split.copies, block, scale)


def _start_sum(
    layout: BlockLayout, sums: Tensor, out: Tensor, lines: Tensor, copies: tuple[int, int], block: int, scale: float
) -> None:
    _, seqlen, heads, head_dim = out.shape
    programs = lines.shape[0] * copies[0] * copies[1] * (block // TILE)
    _sum_parts_kernel[(programs,)](
        sums,
        out,
        lines,
        num_lines=-(-seqlen // block),
        seqlen=seqlen,
        heads=heads,
        batch_copies=copies[0],
        head_copies=copies[1],
        part_stride=sums.stride(0),
        scale=scale,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK=block,
        TILE=TILE,
        AT_ONCE=AT_ONCE,
    )


@kernel_launcher
@triton.jit(do_not_specialize=["rows"])
def _sum_pieces_kernel(
    p_dk,  # (rows, PIECES, D) contiguous
    p_dv,  # (rows, PIECES, E) contiguous
    p_dk_sum,  # (rows, D)
    p_dv_sum,  # (rows, E)
    rows,
    PIECES: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the sums of both gradients over the pieces of each kv head, in order."""
    o_row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, BLOCK_D)
    for i_output in tl.static_range(2):
        p_pieces, p_sum, WIDTH = (p_dk, p_dk_sum, D) if i_output == 0 else (p_dv, p_dv_sum, E)
        inside = (o_row < rows)[:, None] & (o_d < WIDTH)[None, :]
        total = tl.zeros([TILE, BLOCK_D], tl.float32)
        for i_piece in tl.static_range(PIECES):
            at = (o_row * PIECES + i_piece)[:, None] * WIDTH + o_d[None, :]
            total += tl.load(p_pieces + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(p_sum + o_row[:, None] * WIDTH + o_d[None, :], total.to(p_sum.dtype.element_ty), mask=inside)


def sum_pieces(dk: Tensor, dv: Tensor, pieces: int, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Return dk and dv (B, M, Hk, D), given those of `pieces` pieces of each kv head, (B, M, Hk * pieces, D)."""
    found = tuple(x.new_empty(*x.shape[:2], x.shape[2] // pieces, x.shape[3]) for x in (dk, dv))
    record_or_replay(_start_pieces, layout, (dk, dv, *found), pieces, made=2)
    return found[0], found[1]


def _start_pieces(layout: BlockLayout, dk: Tensor, dv: Tensor, dk_sum: Tensor, dv_sum: Tensor, pieces: int) -> None:
    rows = dk_sum.shape[:3].numel()
    _sum_pieces_kernel[(triton.cdiv(rows, PIECE_TILE),)](
        dk,
        dv,
        dk_sum,
        dv_sum,
        rows=rows,
        PIECES=pieces,
        D=dk.shape[3],
        E=dv.shape[3],
        BLOCK_D=triton.next_power_of_2(max(dk.shape[3], dv.shape[3])),
        TILE=PIECE_TILE,
    )


@kernel_launcher
@triton.jit(do_not_specialize=["num_lines", "seqlen", "units", "batch_copies", "head_copies"])
def _merge_parts_kernel(
    p_sums,  # (slots, HEADS * BLOCK, D) fp32, outputs of the parts
    p_sums_lse,  # (slots, HEADS * BLOCK) fp32
    p_out,  # (B, seqlen, units * HEADS, D) contiguous
    p_lse,  # (B, units * HEADS, seqlen) contiguous
    p_lines,
    num_lines,
    seqlen,
    units,
    batch_copies,
    head_copies,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute out and lse of a split row: the mean of its parts' outputs, weighted by their sums of exponentials."""
    ROWS: tl.constexpr = HEADS * BLOCK
    TILES: tl.constexpr = ROWS // TILE
    copies = batch_copies * head_copies
    i_copy = tl.program_id(0) // TILES % copies
    p_line = p_lines + tl.program_id(0) // (TILES * copies) * 3
    line, first, count = tl.load(p_line), tl.load(p_line + 1), tl.load(p_line + 2)
    line_units = units // head_copies
    i_unit = line // num_lines % line_units + i_copy % head_copies
    i_b = (line // num_lines // line_units + i_copy // head_copies).to(tl.int64)
    inner = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    o_d = tl.arange(0, BLOCK_D)
    row_max = tl.full([TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for i in range(0, count, AT_ONCE):
        part = i + tl.arange(0, AT_ONCE)
        at = ((first + part) * copies + i_copy).to(tl.int64)[:, None] * ROWS + inner[None, :]
        known = (part < count)[:, None] & (inner >= 0)[None, :]
        lse = tl.load(p_sums_lse + at, mask=known, other=float("-inf"))
        p_part = p_sums + at[:, :, None] * D + o_d[None, None, :]
        out = tl.load(p_part, mask=known[:, :, None] & (o_d < D)[None, None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale, weights = tl.exp(row_max - shift), tl.exp(lse - shift[None, :])
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(out * weights[:, :, None], 0)
        row_max = new_max
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    i_h = i_unit * HEADS + inner // BLOCK
    position = line % num_lines * BLOCK + inner % BLOCK
    stored = position < tl.where(count > 0, seqlen, 0)
    heads = units * HEADS
    lse = tl.where(empty, float("-inf"), row_max + tl.log(row_sum))
    tl.store(p_lse + (i_b * heads + i_h) * seqlen + position, lse, mask=stored)
    p_row = p_out + ((i_b * seqlen + position) * heads + i_h)[:, None] * D + o_d[None, :]
    out = (acc / row_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_row, out, mask=stored[:, None] & (o_d < D)[None, :])


def merge_parts(
    sums: Tensor, sums_lse: Tensor, out: Tensor, lse: Tensor, split: SplitLines, layout: BlockLayout, heads: int = 1
) -> None:
    """Write the merged results of the parts to the split rows of `out` (B, N, H, D) and `lse` (B, H, N).

    Args:
        sums: (slots, heads * q_block, D) fp32, output of each part, one head after another.
        sums_lse: (slots, heads * q_block) fp32, natural logarithms.
        out: contiguous output, in any dtype.
        lse: contiguous, fp32.
        split: the split rows.
        layout: the layout whose rows they are.
        heads: heads per program.
    """
    record_or_replay(_start_merge, layout, (sums, sums_lse, out, lse, split.lines), split.copies, heads)


def _start_merge(
    layout: BlockLayout,
    sums: Tensor,
    sums_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    lines: Tensor,
    copies: tuple[int, int],
    heads: int,
) -> None:
    _, seqlen, q_heads, head_dim = out.shape
    block = layout.block_size[0]
    programs = lines.shape[0] * copies[0] * copies[1] * (heads * block // TILE)
    _merge_parts_kernel[(programs,)](
        sums,
        sums_lse,
        out,
        lse,
        lines,
        num_lines=layout.q_blocks,
        seqlen=seqlen,
        units=q_heads // heads,
        batch_copies=copies[0],
        head_copies=copies[1],
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK=block,
        HEADS=heads,
        TILE=TILE,
        AT_ONCE=AT_ONCE,
    )
