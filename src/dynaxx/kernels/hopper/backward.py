# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Block-sparse attention backward for Hopper: in one pass (`backward_joint`), or dq apart from dk and dv.

One pass for kv blocks of 128 and enough of them, unless torch is to use deterministic algorithms. Two passes are dq in
Triton with TMA, over the layout, and dk and dv in Gluon (`backward_dkv`), over its transpose: no atomics, the same bits
in every run. TMA clips at the ends of each sequence, so tiles need no bound checks; queries past the end have lse = inf
and give nothing. Shapes: B batch, N / M queries and keys, Hq / Hk query and kv heads, D head_dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.hopper.backward_dkv import backward_dkv
from dynaxx.kernels.hopper.backward_joint import backward_joint
from dynaxx.kernels.hopper.backward_rows import dq_of_sums, rows_and_sums, rows_of
from dynaxx.kernels.hopper.config import backward_dq_tiles, backward_in_one_pass
from dynaxx.kernels.hopper.launch import dense_rows
from dynaxx.kernels.triton.launch import (
    RUNTIME_SIZES,
    layout_arguments,
    order_argument,
    processors,
    tile_rows,
    zeros_like_lse,
)
from dynaxx.kernels.triton.light import Launch, light_launch
from dynaxx.kernels.triton.parts import WHOLE, entries_of, part_of, store_part
from dynaxx.kernels.triton.primitives import (
    FULL,
    LOG2E,
    PARTIAL,
    row_entries,
    started_row,
    visible_elements,
    whole_tiles,
)
from dynaxx.kernels.triton.repeat import repeated
from dynaxx.kernels.triton.split import SPLIT_SIZES, no_split, split_programs, split_rows
from dynaxx.kernels.triton.split_sums import sum_parts
from dynaxx.layout import BlockLayout


@triton.jit
def _entry_of(p_indices, p_codes, first, i_tile, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Start of a tile in the sequence and in its block, and the block's mask code."""
    SPLIT: tl.constexpr = BLOCK // TILE
    part = i_tile % SPLIT * TILE
    entry = first + i_tile // SPLIT
    return tl.load(p_indices + entry) * BLOCK + part, part, tl.load(p_codes + entry)


@triton.jit
def _accumulate_dq(
    dq,  # [BLOCK_M, D] fp32
    b_q,  # [BLOCK_M, D]
    b_do,  # [BLOCK_M, D]
    lse,  # [BLOCK_M], base 2
    delta,  # [BLOCK_M]
    inner_q,  # [BLOCK_M], positions in the q block
    k_desc,
    v_desc,
    i_b,
    i_hk,
    seqlen_k,
    scale_log2,
    p_indices,
    p_codes,
    p_bits,
    p_bands,
    num_masks,
    first,
    begin,
    end,
    MASKING: tl.constexpr,
    D: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add what tiles begin..end of the blocks from entry `first` give."""
    o_k = tl.arange(0, BLOCK_N)
    for i_tile in range(begin, end):
        start, part, code = _entry_of(p_indices, p_codes, first, i_tile, KV_BLOCK, BLOCK_N)
        b_k = k_desc.load([i_b, i_hk, start, 0]).reshape(BLOCK_N, D)
        b_v = v_desc.load([i_b, i_hk, start, 0]).reshape(BLOCK_N, D)
        scores = tl.dot(b_q, b_k.T)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(b_do, b_v.T)
        weights = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKING == PARTIAL:
            r, c = inner_q[:, None], (part + o_k)[None, :]
            visible = visible_elements(p_bits, p_bands, num_masks, code, r, c, Q_BLOCK, KV_BLOCK // 32)
            weights = tl.where(visible, weights, 0.0)
        if MASKING != FULL:
            weights = tl.where((start + o_k < seqlen_k)[None, :], weights, 0.0)
        ds = weights * (dp - delta[:, None])
        dq = tl.dot(ds.to(b_k.dtype), b_k, dq)
    return dq


@light_launch
@triton.jit(do_not_specialize=[*RUNTIME_SIZES, *SPLIT_SIZES])
def _sparse_attention_hopper_bwd_dq_kernel(
    do_desc,
    q_desc,
    k_desc,
    v_desc,
    dq_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK), base 2
    p_delta,  # the same shape
    p_order,
    p_indptr,
    p_num_partial,
    p_indices,
    p_codes,
    p_bits,
    p_bands,
    capacity,
    num_masks,
    layout_stride_b,
    layout_stride_h,
    p_parts,
    p_sums,  # (slots, Q_BLOCK, D) fp32
    num_parts,
    limit,
    batch_copies,
    head_copies,
    seqlen_q,
    seqlen_k,
    batch,
    q_heads,
    group_size,
    scale,
    D: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    SPLIT_M: tl.constexpr = Q_BLOCK // BLOCK_M
    part_programs = num_parts * batch_copies * head_copies * SPLIT_M
    i_program = tl.maximum(tl.program_id(0) - part_programs, 0)
    i_h = i_program % q_heads
    i_b = i_program // q_heads % batch
    i_tile = i_program // (q_heads * batch)
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    if HAS_PARTS:
        slot, part_b, part_h, part_row, part_tile, first, last = part_of(
            tl.program_id(0), p_parts, num_parts, batch_copies, head_copies, q_blocks, q_heads, SPLIT_M
        )
        i_b, i_h = tl.where(slot >= 0, part_b, i_b), tl.where(slot >= 0, part_h, i_h)
        i_tile = tl.where(slot >= 0, part_tile, i_tile)
    lead = i_b * layout_stride_b + i_h * layout_stride_h
    i_row = started_row(p_order, lead, i_tile // SPLIT_M, q_blocks, ORDERED)
    if HAS_PARTS:
        i_row = tl.where(slot >= 0, part_row, i_row)
    inner_q = i_tile % SPLIT_M * BLOCK_M + tl.arange(0, BLOCK_M)
    row_q = i_row * Q_BLOCK + i_tile % SPLIT_M * BLOCK_M
    start, partial, total = row_entries(p_indptr, p_num_partial, lead, i_row, q_blocks, capacity)
    if HAS_PARTS:
        slot, start, partial, total = entries_of(slot, start, partial, total, first, last, limit)

    b_q = q_desc.load([i_b, i_h, row_q, 0]).reshape(BLOCK_M, D)
    b_do = do_desc.load([i_b, i_h, row_q, 0]).reshape(BLOCK_M, D)
    at = (i_b.to(tl.int64) * q_heads + i_h) * (q_blocks * Q_BLOCK) + row_q + tl.arange(0, BLOCK_M)
    lse, delta = tl.load(p_lse + at), tl.load(p_delta + at)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    whole = whole_tiles(total - partial, seqlen_k, KV_BLOCK, BLOCK_N)
    for MASKING in tl.static_range(3):
        if MASKING == PARTIAL:
            first, begin, end = start, 0, partial * (KV_BLOCK // BLOCK_N)
        elif MASKING == FULL:
            first, begin, end = start + partial, 0, whole
        else:
            first, begin, end = start + partial, whole, (total - partial) * (KV_BLOCK // BLOCK_N)
        dq = _accumulate_dq(
            dq, b_q, b_do, lse, delta, inner_q, k_desc, v_desc, i_b, i_h // group_size, seqlen_k, scale * LOG2E,
            p_indices, p_codes, p_bits, p_bands, num_masks, first, begin, end, MASKING, D, Q_BLOCK, KV_BLOCK, BLOCK_N,
        )  # fmt: skip
    if HAS_PARTS:
        store_part(p_sums, slot, dq, inner_q, Q_BLOCK, D, D)
        row_q = tl.where(slot == WHOLE, row_q, seqlen_q)  # past the end, where TMA leaves it out
    dq_desc.store([i_b, i_h, row_q, 0], (dq * scale).to(b_q.dtype).reshape(1, 1, BLOCK_M, D))


def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.triton.attention_backward`."""
    if out.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    do, q, k, v, out = (dense_rows(x) for x in (do, q, k, v, out))
    dlse = zeros_like_lse(lse, layout) if dlse is None else dlse
    programs = layout.kv_blocks * k.shape[0] * k.shape[2]
    if not torch.are_deterministic_algorithms_enabled() and backward_in_one_pass(
        layout.block_size[1], programs, processors(k.device)
    ):
        lse_log2, delta, sums = rows_and_sums(do, out, dlse, lse, layout)
        dk, dv = backward_joint(do, q, k, v, lse_log2, delta, sums, layout, scale)
        return dq_of_sums(sums, q, layout, scale), dk, dv
    lse_log2, delta = rows_of(do, out, dlse, lse, layout)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    split = split_rows(layout, q.shape[0], q.shape[2])
    tensors = (do, q, k, v, dq, lse_log2, delta)
    if split is None:
        repeated(_start_dq, layout, tensors, scale)
    else:
        sums = split.places(q, layout.block_size[0], q.shape[3])
        repeated(_start_dq, layout, tensors, scale, split=split.to(p_sums=sums))
        sum_parts(sums, dq, split, layout, layout.block_size[0], scale)
    dk, dv = backward_dkv(do, q, k, v, lse_log2, delta, layout, scale)
    return dq, dk, dv


def _start_dq(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    scale: float,
    split: dict[str, Any] | None = None,
) -> Launch | None:
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    q_block, kv_block = layout.block_size
    tiles = backward_dq_tiles(head_dim, q_block, kv_block)
    order, ordered = order_argument(layout)
    split = split or no_split(delta)
    programs = (layout.q_blocks * batch * q_heads + split_programs(split)) * (q_block // tiles.block_m)
    started: Launch | None = _sparse_attention_hopper_bwd_dq_kernel[(programs,)](
        tile_rows(do, tiles.block_m),
        tile_rows(q, tiles.block_m),
        tile_rows(k, tiles.block_n),
        tile_rows(v, tiles.block_n),
        tile_rows(dq, tiles.block_m),
        lse_log2,
        delta,
        order,
        *layout_arguments(layout),
        **split,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        q_heads=q_heads,
        group_size=q_heads // kv_heads,
        scale=scale,
        D=head_dim,
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        ORDERED=ordered,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return started
