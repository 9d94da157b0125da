# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Block-sparse attention backward for Hopper: the Triton backend's, with tiles moved by TMA from descriptors.

dq over the layout, dk and dv over its transpose, no atomics, heads of a group summed in a fixed order. TMA clips at the
ends of each sequence, so tiles need no bound checks; queries past the end have lse = inf and give nothing.
Shapes: B batch, N / M queries and keys, Hq / Hk query and kv heads, D head_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynaxx.kernels.hopper.config import backward_dkv_tiles, backward_dq_tiles
from dynaxx.kernels.hopper.launch import tma_view
from dynaxx.kernels.triton.backward import RUNTIME_SIZES, load_row_values, row_delta
from dynaxx.kernels.triton.launch import layout_arguments, transposed_arguments
from dynaxx.kernels.triton.primitives import FULL, LOG2E, PARTIAL, row_entries, visible_elements, whole_tiles
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


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _sparse_attention_hopper_bwd_dq_kernel(
    do_desc,
    q_desc,
    k_desc,
    v_desc,
    dq_desc,
    p_lse,
    p_delta,
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
):
    SPLIT_M: tl.constexpr = Q_BLOCK // BLOCK_M
    i_program = tl.program_id(0)
    i_h = i_program % q_heads
    i_b = i_program // q_heads % batch
    i_tile = (tl.num_programs(0) - 1 - i_program) // (q_heads * batch)
    i_row = i_tile // SPLIT_M
    inner_q = i_tile % SPLIT_M * BLOCK_M + tl.arange(0, BLOCK_M)
    row_q = i_row * Q_BLOCK + i_tile % SPLIT_M * BLOCK_M
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    lead = i_b * layout_stride_b + i_h * layout_stride_h
    start, partial, total = row_entries(p_indptr, p_num_partial, lead, i_row, q_blocks, capacity)

    b_q = q_desc.load([i_b, i_h, row_q, 0]).reshape(BLOCK_M, D)
    b_do = do_desc.load([i_b, i_h, row_q, 0]).reshape(BLOCK_M, D)
    row = (i_b.to(tl.int64) * q_heads + i_h) * seqlen_q
    lse, delta = load_row_values(p_lse + row, p_delta + row, row_q + tl.arange(0, BLOCK_M), seqlen_q)
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
    dq_desc.store([i_b, i_h, row_q, 0], (dq * scale).to(b_q.dtype).reshape(1, 1, BLOCK_M, D))


@triton.jit
def _accumulate_dkv(
    dk,  # [BLOCK_N, D] fp32
    dv,  # [BLOCK_N, D] fp32
    b_k,  # [BLOCK_N, D]
    b_v,  # [BLOCK_N, D]
    inner_k,  # [BLOCK_N], positions in the kv block
    q_desc,
    do_desc,
    p_lse,
    p_delta,
    i_b,
    i_h,
    seqlen_q,
    scale_log2,
    p_indices,
    p_codes,
    p_bits,
    p_bands,
    num_masks,
    first,
    end,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add what the first `end` tiles of the q blocks from entry `first` give."""
    o_q = tl.arange(0, BLOCK_M)
    for i_tile in range(0, end):
        start, part, code = _entry_of(p_indices, p_codes, first, i_tile, Q_BLOCK, BLOCK_M)
        b_q = q_desc.load([i_b, i_h, start, 0]).reshape(BLOCK_M, D)
        b_do = do_desc.load([i_b, i_h, start, 0]).reshape(BLOCK_M, D)
        lse, delta = load_row_values(p_lse, p_delta, start + o_q, seqlen_q)
        scores = tl.dot(b_k, b_q.T)  # [BLOCK_N, BLOCK_M]
        weights = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            r, c = (part + o_q)[None, :], inner_k[:, None]
            visible = visible_elements(p_bits, p_bands, num_masks, code, r, c, Q_BLOCK, KV_BLOCK // 32)
            weights = tl.where(visible, weights, 0.0)
        dv = tl.dot(weights.to(b_do.dtype), b_do, dv)
        dp = tl.dot(b_v, b_do.T)
        ds = weights * (dp - delta[None, :])
        dk = tl.dot(ds.to(b_q.dtype), b_q, dk)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _sparse_attention_hopper_bwd_dkv_kernel(
    do_desc,
    q_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    p_lse,
    p_delta,
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
):
    SPLIT_N: tl.constexpr = KV_BLOCK // BLOCK_N
    kv_heads = q_heads // group_size
    i_program = tl.program_id(0)
    i_hk = i_program % kv_heads
    i_b = i_program // kv_heads % batch
    i_tile = i_program // (kv_heads * batch)  # the first keys are seen by most queries under a causal mask
    i_col = i_tile // SPLIT_N
    inner_k = i_tile % SPLIT_N * BLOCK_N + tl.arange(0, BLOCK_N)
    row_k = i_col * KV_BLOCK + i_tile % SPLIT_N * BLOCK_N
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    b_k = k_desc.load([i_b, i_hk, row_k, 0]).reshape(BLOCK_N, D)
    b_v = v_desc.load([i_b, i_hk, row_k, 0]).reshape(BLOCK_N, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for i_group in range(group_size):
        i_h = i_hk * group_size + i_group
        lead = i_b * layout_stride_b + i_h * layout_stride_h
        start, partial, total = row_entries(p_indptr, p_num_partial, lead, i_col, kv_blocks, capacity)
        row = (i_b.to(tl.int64) * q_heads + i_h) * seqlen_q
        for i_pass in tl.static_range(2):
            if i_pass == 0:
                first, count = start, partial
            else:
                first, count = start + partial, total - partial
            dk, dv = _accumulate_dkv(
                dk, dv, b_k, b_v, inner_k, q_desc, do_desc, p_lse + row, p_delta + row, i_b, i_h, seqlen_q,
                scale * LOG2E, p_indices, p_codes, p_bits, p_bands, num_masks, first, count * (Q_BLOCK // BLOCK_M),
                i_pass == 0, D, Q_BLOCK, KV_BLOCK, BLOCK_M,
            )  # fmt: skip
    dk_desc.store([i_b, i_hk, row_k, 0], (dk * scale).to(b_k.dtype).reshape(1, 1, BLOCK_N, D))
    dv_desc.store([i_b, i_hk, row_k, 0], dv.to(b_k.dtype).reshape(1, 1, BLOCK_N, D))


def attention_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.triton.attention_backward`."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if out.numel() == 0 or v.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    q_block, kv_block = layout.block_size
    lse = lse.contiguous()
    delta = row_delta(do, dlse, out, lse)
    do, q, k, v = (tma_view(x) for x in (do, q, k, v))
    dq_view, dk_view, dv_view = (tma_view(x) for x in (dq, dk, dv))
    shared = {
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "batch": batch,
        "q_heads": q_heads,
        "group_size": q_heads // kv_heads,
        "scale": scale,
        "D": head_dim,
        "Q_BLOCK": q_block,
        "KV_BLOCK": kv_block,
    }
    tiles = backward_dq_tiles(head_dim, q_block, kv_block)
    _sparse_attention_hopper_bwd_dq_kernel[(layout.q_blocks * (q_block // tiles.block_m) * batch * q_heads,)](
        _rows(do, tiles.block_m),
        _rows(q, tiles.block_m),
        _rows(k, tiles.block_n),
        _rows(v, tiles.block_n),
        _rows(dq_view, tiles.block_m),
        lse,
        delta,
        *layout_arguments(layout),
        **shared,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    tiles = backward_dkv_tiles(head_dim, q_block, kv_block)
    _sparse_attention_hopper_bwd_dkv_kernel[(layout.kv_blocks * (kv_block // tiles.block_n) * batch * kv_heads,)](
        _rows(do, tiles.block_m),
        _rows(q, tiles.block_m),
        _rows(k, tiles.block_n),
        _rows(v, tiles.block_n),
        _rows(dk_view, tiles.block_n),
        _rows(dv_view, tiles.block_n),
        lse,
        delta,
        *transposed_arguments(layout),
        **shared,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return dq, dk, dv


def _rows(x: Tensor, rows: int) -> TensorDescriptor:
    """`rows` rows of one head of a `tma_view` at a time."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]])
