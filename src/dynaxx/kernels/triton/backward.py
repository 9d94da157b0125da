# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Block-sparse attention backward in Triton: dq over the layout, dk and dv over its transpose. No atomics.

With weights p = exp(s - lse), dp = do @ v.T and delta = rowsum(do * out) - dlse, the gradient of the scores is
ds = p * (dp - delta), so the gradient through lse costs nothing. A program for dk and dv sums over the heads of its
group in a fixed order: the result is the same bit for bit in every run.

Shapes: B batch, N / M queries and keys, Hq / Hk query and kv heads, D / E head_dim of q, k and of v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import TMA_BLOCK, backward_dkv_tiles, backward_dq_tiles, padded
from dynaxx.kernels.triton.launch import (
    RUNTIME_SIZES,
    layout_arguments,
    order_argument,
    steps_by_tma,
    strides,
    tile_rows,
    transposed_arguments,
    unit_stride,
)
from dynaxx.kernels.triton.primitives import (
    BOUNDS,
    FULL,
    LOG2E,
    PARTIAL,
    exp_rounded,
    load_rows,
    load_tile,
    row_entries,
    started_row,
    store_rows,
    tanh,
    tile_positions,
    visible_elements,
    whole_tiles,
)
from dynaxx.layout import BlockLayout

DELTA_ROWS = 64


@triton.jit
def _load_row_values(p_lse, p_delta, positions, seqlen):
    """lse and delta; a query that sees nothing, or is none, gets lse = inf, so that its weights vanish."""
    inside = (positions >= 0) & (positions < seqlen)
    lse = tl.load(p_lse + positions, mask=inside, other=float("inf"))
    delta = tl.load(p_delta + positions, mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse), delta


@triton.jit
def _weights_of(scores, lse, scale, EXACT: tl.constexpr):
    """exp(scores * scale - lse); through base 2 at once, unless the rounding of both terms there would show."""
    weights = exp_rounded(scores * scale - lse) if EXACT else tl.exp2(scores * (scale * LOG2E) - lse * LOG2E)
    return weights


@triton.jit
def _cap(scores, cap, CAPPED: tl.constexpr):
    """Capped scores, and what their gradients are multiplied with."""
    slope = 1.0
    if CAPPED:
        bent = tanh(scores / cap)
        scores, slope = cap * bent, 1.0 - bent * bent
    return scores, slope


@triton.jit(do_not_specialize=["seqlen_q", "q_heads", "stride_dlb", "stride_dlh", "stride_dln"])
def _sparse_attention_bwd_delta_kernel(
    p_do,
    p_dlse,
    p_out,
    p_lse,
    p_delta,  # (B, Hq, N) contiguous, fp32
    seqlen_q,
    q_heads,
    stride_dob,
    stride_don,
    stride_doh,
    stride_dlb,
    stride_dlh,
    stride_dln,
    stride_ob,
    stride_on,
    stride_oh,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    i_tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    i_b, i_h = head // q_heads, head % q_heads
    pos_q = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pos_q < seqlen_q
    b_do = load_rows(p_do + i_b * stride_dob + i_h * stride_doh, 0, pos_q, stride_don, seqlen_q, E, BLOCK_E)
    b_out = load_rows(p_out + i_b * stride_ob + i_h * stride_oh, 0, pos_q, stride_on, seqlen_q, E, BLOCK_E)
    p_row = p_dlse + i_b * stride_dlb + i_h * stride_dlh + pos_q.to(tl.int64) * stride_dln
    dlse = tl.load(p_row, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(p_lse + head * seqlen_q + pos_q, mask=inside, other=0.0)
    delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1) - dlse
    tl.store(p_delta + head * seqlen_q + pos_q, tl.where(lse == float("-inf"), 0.0, delta), mask=inside)


@triton.jit
def _accumulate_dq(
    dq,  # [BLOCK_M, BLOCK_D] fp32
    b_q,  # [BLOCK_M, BLOCK_D]
    b_do,  # [BLOCK_M, BLOCK_E]
    lse,  # [BLOCK_M]
    delta,  # [BLOCK_M]
    inner_q,  # [BLOCK_M], positions in the q block
    k_rows,  # of this kv head: a pointer, or of all under TMA: a descriptor
    v_rows,
    i_b,
    i_hk,
    stride_kn,
    stride_vn,
    seqlen_k,
    scale,
    cap,
    p_indices,
    p_codes,
    p_bits,
    p_bands,
    num_masks,
    first,
    count,
    begin,
    end,
    MASKING: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add what tiles begin..end of the `count` blocks from entry `first` give."""
    WORDS: tl.constexpr = (KV_BLOCK + 31) // 32
    for i_tile in range(begin, end):
        start, offsets, inner_k, code = tile_positions(
            p_indices, p_codes, first, count, i_tile, seqlen_k, KV_BLOCK, BLOCK_N, MASKING
        )
        b_k = load_tile(
            k_rows, i_b, i_hk, start, offsets, stride_kn, seqlen_k, D, BLOCK_D, BLOCK_N, MASKING != FULL, TMA
        )
        b_v = load_tile(
            v_rows, i_b, i_hk, start, offsets, stride_vn, seqlen_k, E, BLOCK_E, BLOCK_N, MASKING != FULL, TMA
        )
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores, slope = _cap(scores, cap, CAPPED)
        weights = _weights_of(scores, lse[:, None], scale, b_k.dtype == tl.float32)
        if MASKING == PARTIAL:
            if BLOCK_N > KV_BLOCK:
                code = code[None, :]
            r, c = inner_q[:, None], inner_k[None, :]
            visible = visible_elements(p_bits, p_bands, num_masks, code, r, c, Q_BLOCK, WORDS)
            weights = tl.where(visible, weights, 0.0)
        if MASKING != FULL:
            pos_k = start + offsets
            weights = tl.where(((pos_k >= 0) & (pos_k < seqlen_k))[None, :], weights, 0.0)
        dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        ds = weights * (dp - delta[:, None]) * slope
        dq = tl.dot(ds.to(b_k.dtype), b_k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _sparse_attention_bwd_dq_kernel(
    do_rows,  # pointers, or under TMA descriptors of (B, heads, seqlen, head_dim)
    q_rows,
    k_rows,
    v_rows,
    p_lse,
    p_delta,
    p_dq,  # (B, N, Hq, D) contiguous
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
    seqlen_q,
    seqlen_k,
    batch,
    q_heads,
    group_size,
    scale,
    cap,
    stride_dob,
    stride_don,
    stride_doh,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
    ORDERED: tl.constexpr,
):
    SPLIT_M: tl.constexpr = Q_BLOCK // BLOCK_M
    i_program = tl.program_id(0)
    i_h = (i_program % q_heads).to(tl.int64)
    i_b = (i_program // q_heads % batch).to(tl.int64)
    i_tile = i_program // (q_heads * batch)
    lead = i_b * layout_stride_b + i_h * layout_stride_h
    q_blocks = (seqlen_q + Q_BLOCK - 1) // Q_BLOCK
    i_row = started_row(p_order, lead, i_tile // SPLIT_M, q_blocks, ORDERED)
    inner_q = i_tile % SPLIT_M * BLOCK_M + tl.arange(0, BLOCK_M)
    first_q = (i_row * Q_BLOCK + i_tile % SPLIT_M * BLOCK_M).to(tl.int64)
    o_q = tl.arange(0, BLOCK_M)
    pos_q = first_q + o_q
    start, partial, total = row_entries(p_indptr, p_num_partial, lead, i_row, q_blocks, capacity)

    i_hk = i_h // group_size
    if not TMA:
        q_rows += i_b * stride_qb + i_h * stride_qh
        do_rows += i_b * stride_dob + i_h * stride_doh
        k_rows += i_b * stride_kb + i_hk * stride_kh
        v_rows += i_b * stride_vb + i_hk * stride_vh
    head = i_b * q_heads + i_h
    b_q = load_tile(q_rows, i_b, i_h, first_q, o_q, stride_qn, seqlen_q, D, BLOCK_D, BLOCK_M, True, TMA)
    b_do = load_tile(do_rows, i_b, i_h, first_q, o_q, stride_don, seqlen_q, E, BLOCK_E, BLOCK_M, True, TMA)
    lse, delta = _load_row_values(p_lse + head * seqlen_q, p_delta + head * seqlen_q, pos_q, seqlen_q)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = whole_tiles(total - partial, seqlen_k, KV_BLOCK, BLOCK_N)
    for MASKING in tl.static_range(3):
        if MASKING == PARTIAL:
            first, count, begin, end = start, partial, 0, tl.cdiv(partial * KV_BLOCK, BLOCK_N)
        elif MASKING == FULL:
            first, count, begin, end = start + partial, total - partial, 0, whole
        else:
            first, count = start + partial, total - partial
            begin, end = whole, tl.cdiv((total - partial) * KV_BLOCK, BLOCK_N)
        dq = _accumulate_dq(
            dq, b_q, b_do, lse, delta, inner_q, k_rows, v_rows, i_b, i_hk, stride_kn, stride_vn, seqlen_k, scale, cap,
            p_indices, p_codes, p_bits, p_bands, num_masks, first, count, begin, end,
            MASKING, D, E, BLOCK_D, BLOCK_E, Q_BLOCK, KV_BLOCK, BLOCK_N, PRECISION, CAPPED, TMA,
        )  # fmt: skip
    p_dq += (i_b * seqlen_q * q_heads + i_h) * D
    store_rows(p_dq, dq * scale, pos_q, q_heads * D, seqlen_q, D, BLOCK_D)


@triton.jit
def _accumulate_dkv(
    dk,  # [BLOCK_N, BLOCK_D] fp32
    dv,  # [BLOCK_N, BLOCK_E] fp32
    b_k,  # [BLOCK_N, BLOCK_D]
    b_v,  # [BLOCK_N, BLOCK_E]
    inner_k,  # [BLOCK_N], positions in the kv block
    q_rows,  # of this q head: pointers, or of all under TMA: descriptors
    do_rows,
    i_b,
    i_h,
    p_lse,
    p_delta,
    stride_qn,
    stride_don,
    seqlen_q,
    scale,
    cap,
    p_indices,
    p_codes,
    p_bits,
    p_bands,
    num_masks,
    first,
    count,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add what the `count` q blocks from entry `first` give; queries past the end have lse = inf and give nothing."""
    WORDS: tl.constexpr = (KV_BLOCK + 31) // 32
    for i_tile in range(0, tl.cdiv(count * Q_BLOCK, BLOCK_M)):
        start, offsets, inner_q, code = tile_positions(
            p_indices, p_codes, first, count, i_tile, seqlen_q, Q_BLOCK, BLOCK_M, BOUNDS
        )
        b_q = load_tile(q_rows, i_b, i_h, start, offsets, stride_qn, seqlen_q, D, BLOCK_D, BLOCK_M, True, TMA)
        b_do = load_tile(do_rows, i_b, i_h, start, offsets, stride_don, seqlen_q, E, BLOCK_E, BLOCK_M, True, TMA)
        lse, delta = _load_row_values(p_lse, p_delta, start + offsets, seqlen_q)
        scores = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        scores, slope = _cap(scores, cap, CAPPED)
        weights = _weights_of(scores, lse[None, :], scale, b_q.dtype == tl.float32)
        if MASKED:
            if BLOCK_M > Q_BLOCK:
                code = code[None, :]
            r, c = inner_q[None, :], inner_k[:, None]
            visible = visible_elements(p_bits, p_bands, num_masks, code, r, c, Q_BLOCK, WORDS)
            weights = tl.where(visible, weights, 0.0)
        dv = tl.dot(weights.to(b_do.dtype), b_do, dv, input_precision=PRECISION)
        dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        ds = weights * (dp - delta[None, :]) * slope
        dk = tl.dot(ds.to(b_q.dtype), b_q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _sparse_attention_bwd_dkv_kernel(
    do_rows,  # pointers, or under TMA descriptors of (B, heads, seqlen, head_dim)
    q_rows,
    k_rows,
    v_rows,
    p_lse,
    p_delta,
    p_dk,  # (B, M, Hk, D) contiguous
    p_dv,  # (B, M, Hk, E) contiguous
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
    cap,
    stride_dob,
    stride_don,
    stride_doh,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    TMA: tl.constexpr,
    PER_HEAD: tl.constexpr,  # sum the heads of a group apart: exact fp32 needs short sums, and has the registers
):
    SPLIT_N: tl.constexpr = KV_BLOCK // BLOCK_N
    kv_heads = q_heads // group_size
    i_program = tl.program_id(0)
    i_hk = (i_program % kv_heads).to(tl.int64)
    i_b = (i_program // kv_heads % batch).to(tl.int64)
    i_tile = i_program // (kv_heads * batch)  # the first keys are seen by most queries under a causal mask
    i_col = i_tile // SPLIT_N
    inner_k = i_tile % SPLIT_N * BLOCK_N + tl.arange(0, BLOCK_N)
    first_k = (i_col * KV_BLOCK + i_tile % SPLIT_N * BLOCK_N).to(tl.int64)
    o_k = tl.arange(0, BLOCK_N)
    pos_k = first_k + o_k
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    if not TMA:
        k_rows += i_b * stride_kb + i_hk * stride_kh
        v_rows += i_b * stride_vb + i_hk * stride_vh
    b_k = load_tile(k_rows, i_b, i_hk, first_k, o_k, stride_kn, seqlen_k, D, BLOCK_D, BLOCK_N, True, TMA)
    b_v = load_tile(v_rows, i_b, i_hk, first_k, o_k, stride_vn, seqlen_k, E, BLOCK_E, BLOCK_N, True, TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for i_group in range(group_size):
        i_h = i_hk * group_size + i_group
        lead = i_b * layout_stride_b + i_h * layout_stride_h
        start, partial, total = row_entries(p_indptr, p_num_partial, lead, i_col, kv_blocks, capacity)
        row = (i_b * q_heads + i_h) * seqlen_q
        if TMA:
            q_head, do_head = q_rows, do_rows
        else:
            q_head = q_rows + i_b * stride_qb + i_h * stride_qh
            do_head = do_rows + i_b * stride_dob + i_h * stride_doh
        if PER_HEAD:
            sum_dk, sum_dv = dk, dv
            dk, dv = tl.zeros_like(dk), tl.zeros_like(dv)
        for i_pass in tl.static_range(2):
            if i_pass == 0:
                first, count = start, partial
            else:
                first, count = start + partial, total - partial
            dk, dv = _accumulate_dkv(
                dk, dv, b_k, b_v, inner_k, q_head, do_head, i_b, i_h, p_lse + row, p_delta + row,
                stride_qn, stride_don, seqlen_q, scale, cap,
                p_indices, p_codes, p_bits, p_bands, num_masks, first, count,
                i_pass == 0, D, E, BLOCK_D, BLOCK_E, Q_BLOCK, KV_BLOCK, BLOCK_M, PRECISION, CAPPED, TMA,
            )  # fmt: skip
        if PER_HEAD:
            dk, dv = sum_dk + dk, sum_dv + dv
    first_row = i_b * seqlen_k * kv_heads + i_hk
    store_rows(p_dk + first_row * D, dk * scale, pos_k, kv_heads * D, seqlen_k, D, BLOCK_D)
    store_rows(p_dv + first_row * E, dv, pos_k, kv_heads * E, seqlen_k, E, BLOCK_E)


def row_delta(do: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """(B, Hq, N) fp32: rowsum(do * out) - dlse, and 0 for a query that sees nothing."""
    batch, seqlen_q, q_heads = out.shape[:3]
    do, out = unit_stride(do), unit_stride(out)
    delta = torch.empty_like(lse)
    _sparse_attention_bwd_delta_kernel[(-(-seqlen_q // DELTA_ROWS) * batch * q_heads,)](
        do,
        dlse,
        out,
        lse,
        delta,
        seqlen_q=seqlen_q,
        q_heads=q_heads,
        **strides("do", do),
        stride_dlb=dlse.stride(0),
        stride_dlh=dlse.stride(1),
        stride_dln=dlse.stride(2),
        **strides("o", out),
        E=do.shape[3],
        BLOCK_E=padded(do.shape[3]),
        BLOCK_M=DELTA_ROWS,
    )
    return delta


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
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), in the shapes and dtypes of q, k, v, of a forward that gave `out` and `lse`.

    Args:
        do: (B, N, Hq, E), gradient of `out`.
        dlse: (B, Hq, N) fp32, gradient of `lse`; ignored where lse is -inf, as a query that sees nothing has none.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    if out.numel() == 0 or v.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    lse = lse.contiguous()
    delta = row_delta(do, dlse, out, lse)
    shared = {
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "batch": batch,
        "q_heads": q_heads,
        "group_size": q_heads // kv_heads,
        "scale": scale,
        "cap": softcap / scale if softcap and scale else 1.0,
        "CAPPED": softcap is not None and scale != 0,
        **strides("do", do),
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        "D": head_dim,
        "E": head_dim_v,
        "BLOCK_D": padded(head_dim),
        "BLOCK_E": padded(head_dim_v),
        "Q_BLOCK": layout.block_size[0],
        "KV_BLOCK": layout.block_size[1],
        "PRECISION": "ieee",
    }
    tma = min(layout.block_size) >= TMA_BLOCK and steps_by_tma(do, q, k, v)
    tiles = backward_dq_tiles(q.device, q.dtype, head_dim, head_dim_v, layout.block_size, tma)
    order, ordered = order_argument(layout)
    q_tiles = layout.q_blocks * (layout.block_size[0] // tiles.block_m)
    _sparse_attention_bwd_dq_kernel[(q_tiles * batch * q_heads,)](
        tile_rows(do, tiles.block_m) if tma else do,
        tile_rows(q, tiles.block_m) if tma else q,
        tile_rows(k, tiles.block_n) if tma else k,
        tile_rows(v, tiles.block_n) if tma else v,
        lse,
        delta,
        dq,
        order,
        *layout_arguments(layout),
        **shared,
        ORDERED=ordered,
        TMA=tma,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    tiles = backward_dkv_tiles(q.device, q.dtype, head_dim, head_dim_v, layout.block_size, tma)
    kv_tiles = layout.kv_blocks * (layout.block_size[1] // tiles.block_n)
    _sparse_attention_bwd_dkv_kernel[(kv_tiles * batch * kv_heads,)](
        tile_rows(do, tiles.block_m) if tma else do,
        tile_rows(q, tiles.block_m) if tma else q,
        tile_rows(k, tiles.block_n) if tma else k,
        tile_rows(v, tiles.block_n) if tma else v,
        lse,
        delta,
        dk,
        dv,
        *transposed_arguments(layout),
        **shared,
        TMA=tma,
        PER_HEAD=q.dtype == torch.float32,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    return dq, dk, dv
