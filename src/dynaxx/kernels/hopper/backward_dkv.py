# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""dk and dv for Hopper, in Gluon: one producer warp, one consumer warpgroup per 64 rows of a kv block.

The producer feeds q and do tiles of all heads of the group by TMA, in the order of the transposed layout. A consumer
keeps its k and v in shared memory and dk and dv in registers, computes transposed scores, and multiplies the weights
and the score gradients from registers. lse (base 2) and delta come padded to whole q blocks, with lse = inf where there
is no query or it sees nothing, so that such rows give nothing.
"""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dynaxx.kernels.hopper.forward import LOG2E, ROWS, gluon_rows
from dynaxx.kernels.triton.launch import transposed_arguments
from dynaxx.layout import BlockLayout

PROGRAMS_PER_SM = 2  # fewer, of unequal length, leave multiprocessors idle


@gluon.jit
def _read_column(
    p_indptr, p_num_partial, capacity, layout_stride_b, layout_stride_h, i_b, i_h, i_col, kv_blocks
):  # fmt: skip
    """First entry, number of entries and of partial ones of a kv block of one head, within `capacity`.

    Not asked for a head ahead: loads that a loop carries to its next turn are mistaken for invariant by triton 3.6's
    loop-aware CSE, which then keeps the first head's number of partial blocks for all.
    """
    lead = (i_b * layout_stride_b + i_h * layout_stride_h).to(gl.int64)
    p_column = p_indptr + lead * (kv_blocks + 1) + i_col
    start = gl.minimum(gl.maximum(gl.load(p_column), 0), capacity)
    count = gl.minimum(gl.maximum(gl.load(p_column + 1), start), capacity) - start
    partial = gl.load(p_num_partial + lead * kv_blocks + i_col)
    return start, count, gl.minimum(gl.maximum(partial, 0), count)


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty,
    p_indptr, p_num_partial, p_indices, capacity, layout_stride_b, layout_stride_h,
    i_b, i_hk, i_col, kv_blocks, group_size,
    CONSUMERS: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    mbarrier.expect(kv_full.index(0), 2 * CONSUMERS * k_desc.block_type.nbytes)
    for u in gl.static_range(CONSUMERS):
        at = [i_b, i_hk, i_col * KV_BLOCK + u * ROWS, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_full.index(0), k_buffers.index(u))
        tma.async_copy_global_to_shared(v_desc, at, kv_full.index(0), v_buffers.index(u))
    done = 0
    for i_group in range(group_size):
        i_h = i_hk * group_size + i_group
        start, count, _ = _read_column(
            p_indptr, p_num_partial, capacity, layout_stride_b, layout_stride_h, i_b, i_h, i_col, kv_blocks
        )
        for i_tile in range(count * SPLIT):
            block = gl.load(p_indices + start + i_tile // SPLIT)
            at = [i_b, i_h, block * Q_BLOCK + i_tile % SPLIT * ROWS, 0]
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, at, full.index(stage), q_buffers.index(stage))
            tma.async_copy_global_to_shared(do_desc, at, full.index(stage), do_buffers.index(stage))
            done += 1


@gluon.jit
def _keep(
    weights, p_bits, p_bands, num_masks, code, part, rows, columns,
    CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr,
):  # fmt: skip
    """Transposed weights [keys, queries], 0 where the block's mask hides the pair."""
    known = (code >= 0) & (code < num_masks)
    lo = gl.load(p_bands + code * 2, mask=known, other=1)
    hi = gl.load(p_bands + code * 2 + 1, mask=known, other=0)
    r = part + columns
    if lo <= hi:
        distance = r[None, :] - (CONSUMER * ROWS + rows)[:, None]
        weights = gl.where((distance >= lo) & (distance <= hi), weights, 0.0)
    else:
        WORDS: gl.constexpr = KV_BLOCK // 32
        p_words = p_bits + (code.to(gl.int64) * Q_BLOCK + r) * WORDS + CONSUMER * (ROWS // 32)
        columns_known = columns * 0 + gl.where(known, code, -1) >= 0
        low = gl.load(p_words, mask=columns_known, other=0)
        high = gl.load(p_words + 1, mask=columns_known, other=0)
        c = rows[:, None]
        word = gl.where(c < 32, low[None, :] + c * 0, high[None, :] + c * 0)
        weights = gl.where(((word >> (c % 32)) & 1) != 0, weights, 0.0)
    return weights


@gluon.jit
def _consume_tiles(
    dk, dv, k, v, q_buffers, do_buffers, full, empty, p_lse, p_delta,
    p_indices, p_codes, p_bits, p_bands, num_masks, start, q_blocks, scale_log2, done, rows, columns, begin, end,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Add what tiles begin..end of the entries from `start` give; p_lse and p_delta are of their head."""
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = dk.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    for i_tile in range(begin, end):
        stage = (done + i_tile) % STAGES
        part = i_tile % SPLIT * ROWS
        block = gl.load(p_indices + start + i_tile // SPLIT)
        at = gl.minimum(gl.maximum(block, 0), q_blocks - 1) * Q_BLOCK + part + columns
        q = q_buffers.index(stage).reshape([ROWS, D])
        do = do_buffers.index(stage).reshape([ROWS, D])
        mbarrier.wait(full.index(stage), ((done + i_tile) // STAGES) & 1)
        zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
        s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = gl.load(p_lse + at)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            code = gl.load(p_codes + start + i_tile // SPLIT)
            weights = _keep(weights, p_bits, p_bands, num_masks, code, part, rows, columns, CONSUMER, Q_BLOCK, KV_BLOCK)
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        delta = gl.load(p_delta + at)
        dv_token = warpgroup_mma(p, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        ds = gl.convert_layout((weights * (dp - delta[None, :])).to(q.dtype), p_layout)
        dk_token = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
        mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume(
    dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, p_lse, p_delta,
    p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, layout_stride_b,
    layout_stride_h, i_b, i_hk, i_col, kv_blocks, q_blocks, group_size, scale, scale_log2,
    CONSUMER: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SPLIT: gl.constexpr = Q_BLOCK // ROWS
    D: gl.constexpr = dk_desc.block_type.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, s_layout))
    dk = gl.zeros([ROWS, D], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, D], gl.float32, acc_layout)
    k = k_buffers.index(CONSUMER).reshape([ROWS, D])
    v = v_buffers.index(CONSUMER).reshape([ROWS, D])
    mbarrier.wait(kv_full.index(0), 0)
    done = 0
    for i_group in range(group_size):
        start, count, partial = _read_column(
            p_indptr, p_num_partial, capacity, layout_stride_b, layout_stride_h,
            i_b, i_hk * group_size + i_group, i_col, kv_blocks,
        )  # fmt: skip
        row = i_group * (q_blocks * Q_BLOCK)
        dk, dv = _consume_tiles(
            dk, dv, k, v, q_buffers, do_buffers, full, empty, p_lse + row, p_delta + row,
            p_indices, p_codes, p_bits, p_bands, num_masks, start, q_blocks, scale_log2, done, rows, columns,
            0, partial * SPLIT, True, CONSUMER, Q_BLOCK, KV_BLOCK, STAGES,
        )  # fmt: skip
        dk, dv = _consume_tiles(
            dk, dv, k, v, q_buffers, do_buffers, full, empty, p_lse + row, p_delta + row,
            p_indices, p_codes, p_bits, p_bands, num_masks, start, q_blocks, scale_log2, done, rows, columns,
            partial * SPLIT, count * SPLIT, False, CONSUMER, Q_BLOCK, KV_BLOCK, STAGES,
        )  # fmt: skip
        done += count * SPLIT
    k.store((dk * scale).to(dk_desc.dtype))  # k and v are read no more: their buffers carry the results out
    v.store(dv.to(dk_desc.dtype))
    fence_async_shared()
    at = [i_b, i_hk, i_col * KV_BLOCK + CONSUMER * ROWS, 0]
    tma.async_copy_shared_to_global(dk_desc, at, k_buffers.index(CONSUMER))
    tma.async_copy_shared_to_global(dv_desc, at, v_buffers.index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity", "num_masks", "seqlen_k", "q_blocks", "batch", "kv_heads", "group_size"])
def _sparse_attention_hopper_bwd_dkv_kernel(
    do_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf where there is nothing
    p_delta,  # the same shape, 0 there
    p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands,
    capacity, num_masks, layout_stride_b, layout_stride_h,
    seqlen_k, q_blocks, batch, kv_heads, group_size, scale, scale_log2,
    CONSUMERS: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    i_program = gl.program_id(0)
    i_hk = i_program % kv_heads
    i_b = i_program // kv_heads % batch
    i_col = i_program // (kv_heads * batch)  # the first keys are seen by most queries under a causal mask
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    first_head = (i_b * kv_heads + i_hk).to(gl.int64) * group_size
    p_lse += first_head * q_blocks * Q_BLOCK
    p_delta += first_head * q_blocks * Q_BLOCK

    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], v_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (
                dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, p_lse, p_delta,
                p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, layout_stride_b,
                layout_stride_h, i_b, i_hk, i_col, kv_blocks, q_blocks, group_size, scale, scale_log2,
                0, Q_BLOCK, KV_BLOCK, STAGES,
            )),
            (_consume, (
                dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, p_lse, p_delta,
                p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, layout_stride_b,
                layout_stride_h, i_b, i_hk, i_col, kv_blocks, q_blocks, group_size, scale, scale_log2,
                1, Q_BLOCK, KV_BLOCK, STAGES,
            )),
            (_produce, (
                q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty,
                p_indptr, p_num_partial, p_indices, capacity, layout_stride_b, layout_stride_h,
                i_b, i_hk, i_col, kv_blocks, group_size,
                CONSUMERS, Q_BLOCK, KV_BLOCK, STAGES,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, p_lse, p_delta,
                p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands, capacity, num_masks, layout_stride_b,
                layout_stride_h, i_b, i_hk, i_col, kv_blocks, q_blocks, group_size, scale, scale_log2,
                0, Q_BLOCK, KV_BLOCK, STAGES,
            )),
            (_produce, (
                q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty,
                p_indptr, p_num_partial, p_indices, capacity, layout_stride_b, layout_stride_h,
                i_b, i_hk, i_col, kv_blocks, group_size,
                CONSUMERS, Q_BLOCK, KV_BLOCK, STAGES,
            )),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def backward_dkv(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, layout: BlockLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (dk, dv), contiguous (B, M, Hk, D). Takes (B, N, H, D) tensors, and lse and delta as the kernel does.

    Where keys are too few to fill the GPU, each q head is a program of its own, and a group is summed afterwards.
    """
    batch, seqlen_k, kv_heads = k.shape[:3]
    group_size = q.shape[2] // kv_heads
    if group_size > 1 and layout.kv_blocks * batch * kv_heads < PROGRAMS_PER_SM * _multiprocessors(k.device):
        k, v = (x.repeat_interleave(group_size, 2) for x in (k, v))
        heads = backward_dkv(do, q, k, v, lse, delta, layout, scale)
        return tuple(x.unflatten(2, (kv_heads, group_size)).sum(3) for x in heads)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    q_block, kv_block = layout.block_size
    consumers = kv_block // 64
    _sparse_attention_hopper_bwd_dkv_kernel[(layout.kv_blocks * batch * kv_heads,)](
        *(gluon_rows(x, 64) for x in (do, q, k, v, dk, dv)),
        lse,
        delta,
        *transposed_arguments(layout),
        seqlen_k=seqlen_k,
        q_blocks=layout.q_blocks,
        batch=batch,
        kv_heads=kv_heads,
        group_size=group_size,
        scale=scale,
        scale_log2=scale * LOG2E,
        CONSUMERS=consumers,
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        STAGES=2,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        maxnreg=168 if consumers == 2 else 128,
    )
    return dk, dv


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
