# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""dk and dv for Hopper, in Gluon.

A program owns a kv block of one kv head: a producer warp (`backward_produce`) and a consumer (`backward_consume`) for
each 64 keys. lse (base 2) and delta come padded to whole q blocks, with lse = inf where there is no query or it sees
nothing, so that such rows give nothing.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dynaxx.kernels.hopper.backward_consume import consume
from dynaxx.kernels.hopper.backward_produce import column_of, fed_by, produce
from dynaxx.kernels.hopper.config import backward_stages
from dynaxx.kernels.hopper.launch import column_sizes, gluon_rows
from dynaxx.kernels.hopper.parts import ALL_ENTRIES, WHOLE, part_or_whole
from dynaxx.kernels.hopper.wide_dkv import start_wide_dkv
from dynaxx.kernels.triton.launch import processors, transposed_arguments
from dynaxx.kernels.triton.light import Launch, light_launch
from dynaxx.kernels.triton.repeat import repeated
from dynaxx.kernels.triton.split import SPLIT_SIZES, no_split, split_columns, split_programs
from dynaxx.kernels.triton.split_sums import sum_parts
from dynaxx.layout import BlockLayout

PROGRAMS_PER_SM = 2  # fewer, of unequal length, leave multiprocessors idle
SIZES = ["capacity", "num_masks", "seqlen_k", "q_blocks", "kv_heads", "group_size", "together"]


@light_launch
@gluon.jit(do_not_specialize=[*SIZES, *SPLIT_SIZES])
def _sparse_attention_hopper_bwd_dkv_kernel(
    do_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc,
    p_lse,  # (B, Hq, q_blocks * Q_BLOCK) fp32, base 2, inf where there is nothing
    p_delta,  # the same shape, 0 there
    p_indptr, p_num_partial, p_indices, p_codes, p_bits, p_bands,
    capacity, num_masks, layout_stride_b, layout_stride_h,
    p_parts, p_sums, num_parts, limit, batch_copies, head_copies,
    seqlen_k, q_blocks, kv_heads, group_size, together, scale, scale_log2, cap_rate,
    CONSUMERS: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_PARTS: gl.constexpr,
):  # fmt: skip
    i_program = gl.program_id(0) - num_parts * batch_copies * head_copies  # parts come first
    kv_blocks = (seqlen_k + KV_BLOCK - 1) // KV_BLOCK
    i_b, i_hk, i_col = column_of(i_program, kv_blocks, kv_heads, together)
    first, last, slot = 0, ALL_ENTRIES, WHOLE
    if HAS_PARTS:
        i_b, i_hk, i_col, first, last, slot = part_or_whole(
            gl.program_id(0), i_b, i_hk, i_col, p_parts, num_parts, limit, batch_copies, head_copies,
            p_indptr, capacity, layout_stride_b, layout_stride_h, kv_blocks, kv_heads, group_size,
        )  # fmt: skip
    first_head = (i_b * kv_heads + i_hk).to(gl.int64) * group_size
    p_lse += first_head * q_blocks * Q_BLOCK
    p_delta += first_head * q_blocks * Q_BLOCK

    fed = fed_by(q_desc, do_desc, k_desc, v_desc, CONSUMERS, STAGES, CONSUMERS)
    q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, numbers, stats = fed
    columns = (
        dk_desc, dv_desc, q_buffers, do_buffers, k_buffers, v_buffers, kv_full, full, empty, numbers, stats,
        p_indptr, p_num_partial, p_bits, capacity, layout_stride_b, layout_stride_h, i_b, i_hk, i_col,
        kv_blocks, group_size, first, last, slot, p_sums, scale, scale_log2, cap_rate,
    )  # fmt: skip
    blocks = (
        q_desc, do_desc, k_desc, v_desc, fed, p_lse, p_delta, p_indptr, p_num_partial, p_indices, p_codes, p_bands,
        capacity, num_masks, layout_stride_b, layout_stride_h, i_b, i_hk, i_col, kv_blocks, q_blocks, group_size,
        first, last,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (columns, 0, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
            (consume, (columns, 1, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
            (produce, (blocks, 0, 2, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (columns, 0, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
            (produce, (blocks, 0, 1, Q_BLOCK, KV_BLOCK, STAGES, HAS_PARTS)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def backward_dkv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    layout: BlockLayout,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (dk, dv), contiguous. Takes (B, N, H, D) tensors, and lse and delta as the kernel does.

    Where keys are too few to fill the GPU, each q head is a program of its own, and a group is summed afterwards.
    """
    batch, kv_heads = k.shape[0], k.shape[2]
    group_size = q.shape[2] // kv_heads
    start = start_wide_dkv if q.shape[3] == 256 else _start_dkv
    if group_size > 1 and layout.kv_blocks * batch * kv_heads < PROGRAMS_PER_SM * processors(k.device):
        k, v = (x.repeat_interleave(group_size, 2) for x in (k, v))
        heads = backward_dkv(do, q, k, v, lse, delta, layout, scale, softcap)
        dk, dv = (x.unflatten(2, (kv_heads, group_size)).sum(3) for x in heads)
        return dk, dv
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    split = split_columns(layout, batch, q.shape[2], kv_heads)
    if split is None:
        repeated(start, layout, (do, q, k, v, dk, dv, lse, delta), scale, softcap)
        return dk, dv
    kv_block = layout.block_size[1]
    parts = split.places(q, 2, kv_block, q.shape[3])
    repeated(start, layout, (do, q, k, v, dk, dv, lse, delta), scale, softcap, split=split.to(p_sums=parts))
    sum_parts(parts[:, 0], dk, split, layout, kv_block, scale)
    sum_parts(parts[:, 1], dv, split, layout, kv_block)
    return dk, dv


def _start_dkv(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    softcap: float | None,
    split: dict[str, Any] | None = None,
) -> Launch | None:
    q_block, kv_block = layout.block_size
    consumers = kv_block // 64
    split = split or no_split(delta)
    programs = layout.kv_blocks * k.shape[0] * k.shape[2] + split_programs(split)
    started: Launch | None = _sparse_attention_hopper_bwd_dkv_kernel[(programs,)](
        *(gluon_rows(x, 64) for x in (do, q, k, v, dk, dv)),
        lse,
        delta,
        *transposed_arguments(layout),
        **split,
        **column_sizes(layout, q, k, scale, softcap),
        CONSUMERS=consumers,
        Q_BLOCK=q_block,
        KV_BLOCK=kv_block,
        STAGES=backward_stages(q.shape[3]),
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
        num_warps=4,
        maxnreg=168 if consumers == 2 else 128,
    )
    return started
