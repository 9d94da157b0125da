# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""dq, dk and dv for Hopper in one pass over the kv blocks, in Gluon: 5 matrix products where two passes take 7.

A program owns a block of 128 keys of one kv head: a producer warp (`backward_produce`) and two consumers
(`backward_joint_consume`). Programs of other keys add to the same rows of dq, in an order that no run repeats: dq may
differ in its last bits from run to run. One kv head comes after the other, so that its sums stay in L2: with two at a
time it was 8 % slower, with eight 29 %.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.hopper.backward_joint_consume import SLOTS, consume
from dynaxx.kernels.hopper.backward_produce import FIELDS, RING, produce
from dynaxx.kernels.hopper.config import backward_stages
from dynaxx.kernels.hopper.forward import LOG2E, barriers
from dynaxx.kernels.hopper.forward_consume import ROWS
from dynaxx.kernels.hopper.launch import gluon_rows
from dynaxx.kernels.hopper.signals import NUMBERS
from dynaxx.kernels.triton.launch import transposed_arguments
from dynaxx.kernels.triton.light import Launch, light_launch
from dynaxx.kernels.triton.repeat import repeated
from dynaxx.layout import BlockLayout

CONSUMERS = gl.constexpr(2)


@light_launch
@triton.jit
def _sparse_attention_hopper_bwd_scale_kernel(p_sums, p_dq, elements, scale, BLOCK: tl.constexpr):
    """dq = scale * sums."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(p_sums + at, mask=at < elements, other=0.0)
    tl.store(p_dq + at, (sums * scale).to(p_dq.dtype.element_ty), mask=at < elements)


@light_launch
@gluon.jit(do_not_specialize=["capacity", "num_masks", "seqlen_k", "q_blocks", "kv_heads", "group_size"])
def _sparse_attention_hopper_bwd_kernel(
    do_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf where there is nothing
    p_delta,  # the same shape, 0 there
    p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands,
    capacity, num_masks, layout_stride_b, layout_stride_h,
    seqlen_k, q_blocks, kv_heads, group_size, scale, scale_log2,
    Q_BLOCK: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    KV_BLOCK: gl.constexpr = CONSUMERS * ROWS
    i_program = gl.program_id(0)
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    i_col = i_program % kv_blocks  # the first keys are seen by most queries under a causal mask
    i_hk = i_program // kv_blocks % kv_heads
    i_b = i_program // (kv_blocks * kv_heads)
    first_head = (i_b * kv_heads + i_hk).to(gl.int64) * group_size
    D: gl.constexpr = q_desc.block_type.shape[3]
    p_lse += first_head * q_blocks * Q_BLOCK
    p_delta += first_head * q_blocks * Q_BLOCK

    dtype: gl.constexpr = q_desc.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], v_desc.layout)
    ds_buffers = gl.allocate_shared_memory(dtype, [SLOTS * CONSUMERS, ROWS, ROWS], gl.NVMMASharedLayout(128, 16, 2))
    dq_buffers = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, 1, ROWS, D // CONSUMERS], dq_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], NUMBERS)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], NUMBERS)
    kv_full = barriers(1, 1)
    kv_read = barriers(1, CONSUMERS)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, CONSUMERS)
    ds_full = barriers(SLOTS, CONSUMERS)
    gl.warp_specialize([
        (consume, (
            dq_desc, dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, ds_buffers, dq_buffers,
            kv_full, kv_read, full, empty, ds_full, numbers, stats,
            p_indptr, p_num_partial, p_bits, capacity, layout_stride_b, layout_stride_h, i_b, i_hk, i_col,
            kv_blocks, group_size, scale, scale_log2, CONSUMERS, 0, Q_BLOCK, KV_BLOCK, STAGES,
        )),
        (consume, (
            dq_desc, dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, ds_buffers, dq_buffers,
            kv_full, kv_read, full, empty, ds_full, numbers, stats,
            p_indptr, p_num_partial, p_bits, capacity, layout_stride_b, layout_stride_h, i_b, i_hk, i_col,
            kv_blocks, group_size, scale, scale_log2, CONSUMERS, 1, Q_BLOCK, KV_BLOCK, STAGES,
        )),
        (produce, (
            q_desc, do_desc, k_desc, v_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty,
            numbers, stats, p_lse, p_delta, p_indptr, p_num_partial, p_indices, p_codes, p_bands, capacity,
            num_masks, layout_stride_b, layout_stride_h, i_b, i_hk, i_col, kv_blocks, q_blocks, group_size,
            CONSUMERS, Q_BLOCK, KV_BLOCK, STAGES,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def backward_joint(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, layout: BlockLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), contiguous, for kv blocks of 128. Takes what `backward_dkv` takes."""
    sums = q.new_zeros(q.shape, dtype=torch.float32)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    repeated(_start_joint, layout, (do, q, k, v, sums, dk, dv, lse, delta), scale)
    repeated(_start_scale, layout, (sums, dq), scale)
    return dq, dk, dv


def _start_joint(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
) -> Launch | None:
    batch, seqlen_k, kv_heads = k.shape[:3]
    q_heads, head_dim = q.shape[2:]
    started: Launch | None = _sparse_attention_hopper_bwd_kernel[(layout.kv_blocks * batch * kv_heads,)](
        *(gluon_rows(x, 64) for x in (do, q, k, v)),
        gluon_rows(sums, 64, head_dim // 2),
        *(gluon_rows(x, 64) for x in (dk, dv)),
        lse,
        delta,
        *transposed_arguments(layout),
        seqlen_k=seqlen_k,
        q_blocks=layout.q_blocks,
        kv_heads=kv_heads,
        group_size=q_heads // kv_heads,
        scale=scale,
        scale_log2=scale * LOG2E,
        Q_BLOCK=layout.block_size[0],
        STAGES=backward_stages(head_dim),
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        maxnreg=168,
    )
    return started


def _start_scale(layout: BlockLayout, sums: Tensor, dq: Tensor, scale: float) -> Launch | None:
    started: Launch | None = _sparse_attention_hopper_bwd_scale_kernel[(triton.cdiv(sums.numel(), 4096),)](
        sums,
        dq,
        elements=sums.numel(),
        scale=scale,
        BLOCK=4096,
    )
    return started
