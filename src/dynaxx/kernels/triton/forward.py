# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Block-sparse attention forward in Triton: one program per tile of BLOCK_M queries of one head.

It walks the partial blocks of its row with their element masks, then the full blocks without, and keeps the running
softmax in base 2. Programs start with the last rows, which are the longest under a causal mask, and with all heads of a
row together, so that the heads of a group read the same keys from L2.

Shapes: B batch, N / M queries and keys, Hq / Hk query and kv heads, D / E head_dim of q, k and of v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import TMA_BLOCK, forward_tiles, padded
from dynaxx.kernels.triton.launch import (
    RUNTIME_SIZES,
    layout_arguments,
    order_argument,
    positive_scale,
    steps_by_tma,
    strides,
    tile_rows,
    unit_stride,
)
from dynaxx.kernels.triton.light import Launch, light_launch
from dynaxx.kernels.triton.primitives import (
    FULL,
    LOG2E,
    PARTIAL,
    exp_rounded,
    load_tile,
    row_entries,
    started_row,
    store_rows,
    tanh,
    tile_positions,
    visible_elements,
    whole_tiles,
)
from dynaxx.kernels.triton.repeat import repeated
from dynaxx.layout import BlockLayout


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_E] fp32, sum of p @ v
    row_max,  # [BLOCK_M] fp32, of the unscaled scores
    row_sum,  # [BLOCK_M] fp32
    b_q,  # [BLOCK_M, BLOCK_D]
    inner_q,  # [BLOCK_M], positions in the q block
    k_rows,  # of this kv head: a pointer, or of all under TMA: a descriptor
    v_rows,
    i_b,
    i_hk,
    stride_kn,
    stride_vn,
    seqlen_k,
    scale,  # > 0
    cap,  # softcap / scale
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
    """Attend to tiles begin..end of the `count` blocks from entry `first`."""
    WORDS: tl.constexpr = (KV_BLOCK + 31) // 32
    scale_log2 = scale * LOG2E
    for i_tile in range(begin, end):
        start, offsets, inner_k, code = tile_positions(
            p_indices, p_codes, first, count, i_tile, seqlen_k, KV_BLOCK, BLOCK_N, MASKING
        )
        b_k = load_tile(
            k_rows, i_b, i_hk, start, offsets, stride_kn, seqlen_k, D, BLOCK_D, BLOCK_N, MASKING != FULL, TMA
        )
        scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if CAPPED:
            scores = cap * tanh(scores / cap)
        if MASKING == PARTIAL:
            if BLOCK_N > KV_BLOCK:
                code = code[None, :]
            r, c = inner_q[:, None], inner_k[None, :]
            visible = visible_elements(p_bits, p_bands, num_masks, code, r, c, Q_BLOCK, WORDS)
            scores = tl.where(visible, scores, float("-inf"))
        if MASKING != FULL:
            pos_k = start + offsets
            scores = tl.where(((pos_k >= 0) & (pos_k < seqlen_k))[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if MASKING != FULL:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        if b_q.dtype == tl.float32:  # the rounding of two products that nearly cancel would show
            rescale = exp_rounded((row_max - shift) * scale)
            weights = exp_rounded((scores - shift[:, None]) * scale)
        else:
            rescale = tl.exp2((row_max - shift) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - (shift * scale_log2)[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        b_v = load_tile(
            v_rows, i_b, i_hk, start, offsets, stride_vn, seqlen_k, E, BLOCK_E, BLOCK_N, MASKING != FULL, TMA
        )
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@light_launch
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _sparse_attention_fwd_kernel(
    q_rows,  # pointers, or under TMA descriptors of (B, Hq, N, D), (B, Hk, M, D) and (B, Hk, M, E)
    k_rows,
    v_rows,
    p_out,  # (B, N, Hq, E) contiguous
    p_lse,  # (B, Hq, N) contiguous, fp32
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
    ORDERED: tl.constexpr,
    TMA: tl.constexpr,
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
    pos_q = first_q + tl.arange(0, BLOCK_M)

    start, partial, total = row_entries(p_indptr, p_num_partial, lead, i_row, q_blocks, capacity)

    i_hk = i_h // group_size
    if not TMA:
        q_rows += i_b * stride_qb + i_h * stride_qh
        k_rows += i_b * stride_kb + i_hk * stride_kh
        v_rows += i_b * stride_vb + i_hk * stride_vh
    o_q = tl.arange(0, BLOCK_M)
    b_q = load_tile(q_rows, i_b, i_h, first_q, o_q, stride_qn, seqlen_q, D, BLOCK_D, BLOCK_M, True, TMA)

    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    whole = whole_tiles(total - partial, seqlen_k, KV_BLOCK, BLOCK_N)
    for MASKING in tl.static_range(3):
        if MASKING == PARTIAL:
            first, count, begin, end = start, partial, 0, tl.cdiv(partial * KV_BLOCK, BLOCK_N)
        elif MASKING == FULL:
            first, count, begin, end = start + partial, total - partial, 0, whole
        else:
            first, count = start + partial, total - partial
            begin, end = whole, tl.cdiv((total - partial) * KV_BLOCK, BLOCK_N)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, b_q, inner_q, k_rows, v_rows, i_b, i_hk, stride_kn, stride_vn, seqlen_k, scale, cap,
            p_indices, p_codes, p_bits, p_bands, num_masks, first, count, begin, end,
            MASKING, D, E, BLOCK_D, BLOCK_E, Q_BLOCK, KV_BLOCK, BLOCK_N, PRECISION, CAPPED, TMA,
        )  # fmt: skip

    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    lse = tl.where(empty, float("-inf"), row_max * scale + tl.log(row_sum))
    tl.store(p_lse + (i_b * q_heads + i_h) * seqlen_q + pos_q, lse, mask=pos_q < seqlen_q)
    p_out += (i_b * seqlen_q * q_heads + i_h) * E
    store_rows(p_out, acc, pos_q, q_heads * E, seqlen_q, E, BLOCK_E)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.attention_forward`; fp32 inputs are multiplied in full fp32."""
    batch, seqlen_q, q_heads = q.shape[:3]
    out = q.new_empty(batch, seqlen_q, q_heads, v.shape[3])
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q, scale = positive_scale(q, scale)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    repeated(_start_forward, layout, (q, k, v, out, lse), scale, softcap, made=2)
    return out, lse


def _start_forward(
    layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float | None
) -> Launch | None:
    batch, seqlen_q, q_heads, head_dim = q.shape
    seqlen_k, kv_heads, head_dim_v = v.shape[1:]
    tma = min(layout.block_size) >= TMA_BLOCK and steps_by_tma(q, k, v)
    tiles = forward_tiles(q.device, q.dtype, head_dim, head_dim_v, layout.block_size, tma)
    order, ordered = order_argument(layout)
    q_tiles = layout.q_blocks * (layout.block_size[0] // tiles.block_m)
    started: Launch | None = _sparse_attention_fwd_kernel[(q_tiles * batch * q_heads,)](
        tile_rows(q, tiles.block_m) if tma else q,
        tile_rows(k, tiles.block_n) if tma else k,
        tile_rows(v, tiles.block_n) if tma else v,
        out,
        lse,
        order,
        *layout_arguments(layout),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        batch=batch,
        q_heads=q_heads,
        group_size=q_heads // kv_heads,
        scale=scale,
        cap=1.0 if softcap is None else softcap / scale,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        D=head_dim,
        E=head_dim_v,
        BLOCK_D=padded(head_dim),
        BLOCK_E=padded(head_dim_v),
        Q_BLOCK=layout.block_size[0],
        KV_BLOCK=layout.block_size[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PRECISION="ieee",
        CAPPED=softcap is not None,
        ORDERED=ordered,
        TMA=tma,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )
    return started
