# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention backward in Triton: dq over the layout, dk and dv over its transpose. No atomics.

With weights p = exp(s - lse), dp = do @ v.T and delta = rowsum(do * out) - dlse, the gradient of the scores is
ds = p * (dp - delta). The gradient through lse is part of delta and costs nothing.

    dq kernel    a program per row of the layout      q, do stay; k, v stream    writes dq, and each query's lse, delta
    dkv kernel   a program per column of the layout   k, v stay; q, do stream    reads lse, delta; writes dk, dv

A program for dk and dv sums over the heads of its group in a fixed order, so every run gives the same bits.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v.
"""

from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.attention.triton.backward_bias import add_bias_gradient
from dynaxx.kernels.attention.triton.backward_dkv import _sparse_attention_bwd_dkv_kernel
from dynaxx.kernels.attention.triton.backward_dq import _sparse_attention_bwd_dq_kernel
from dynaxx.kernels.attention.triton.backward_rows import empty_rows, shared_arguments
from dynaxx.kernels.attention.triton.config import (
    TMA_BLOCK,
    backward_dkv_tiles,
    backward_dq_tiles,
    backward_dv_tiles,
    dkv_apart,
    dkv_in_stages,
    dkv_span,
    dq_from_registers,
    query_span,
)
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.runtime.arguments import (
    layout_arguments,
    order_argument,
    steps_by_tma,
    strides_of,
    tile_rows,
    tile_values,
    transposed_arguments,
    unit_stride,
    zeros_like_lse,
)
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.schedule.split import no_split, split_columns, split_programs, split_rows
from dynaxx.kernels.schedule.split_sums import sum_parts
from dynaxx.layout import BlockLayout


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
    softcap: float | None = None,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the shapes and dtypes of q, k, v, for a forward that returned `out` and `lse`.

    Args:
        do: (B, N, Hq, E), gradient of `out`.
        dlse: (B, Hq, N) fp32, gradient of `lse`, or None. Ignored where lse is -inf, because such a query has no
            gradient.
        q: (B, N, Hq, D).
        k: (B, M, Hk, D).
        v: (B, M, Hk, E).
        out: (B, N, Hq, E).
        lse: (B, Hq, N) fp32.
        layout: layout of the forward.
        scale: softmax scale of the forward.
        softcap: softcap of the forward, or None.
        bias: bias of the forward, or None.
        dbias: tensor like `bias` that receives its gradient, or None.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if out.numel() == 0 or v.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    do, q, k, v, out = (unit_stride(x) for x in (do, q, k, v, out))
    lse = lse.contiguous()
    dlse = zeros_like_lse(lse, layout) if dlse is None else dlse
    values = empty_rows(lse)
    _fill_dq(layout, (do, q, k, v, out, lse, dlse, bias, values, dq), scale, softcap)
    _fill_dkv(layout, (do, q, k, v, values, bias, dk, dv), scale, softcap)
    if bias is not None and dbias is not None:
        add_bias_gradient(dbias, (do, q, k, v, values, bias), layout, scale, softcap)
    return dq, dk, dv


def _fill_dq(layout: BlockLayout, tensors: tuple[Any, ...], scale: float, softcap: float | None) -> None:
    q, dq = tensors[1], tensors[-1]
    split = split_rows(layout, q.shape[0], q.shape[2])
    if split is None:
        record_or_replay(_start_dq, layout, tensors, scale, softcap)
        return
    sums = split.places(q, layout.block_size[0], q.shape[3])
    record_or_replay(_start_dq, layout, tensors, scale, softcap, split=split.to(p_sums=sums))
    sum_parts(sums, dq, split, layout, layout.block_size[0], scale)


def _fill_dkv(layout: BlockLayout, tensors: tuple[Any, ...], scale: float, softcap: float | None) -> None:
    _, q, k, v, *_, dk, dv = tensors
    split = split_columns(layout, q.shape[0], q.shape[2], k.shape[2])
    kv_block, head_dim = layout.block_size[1], q.shape[3]
    sums = None if split is None else split.places(q, kv_block * (head_dim + v.shape[3]))
    for gradients in ("dk", "dv") if dkv_apart(head_dim, v.shape[3]) else ("dk and dv",):
        if split is None or sums is None:
            record_or_replay(_start_dkv, layout.with_transposed(), tensors, scale, softcap, gradients)
        else:
            record_or_replay(
                _start_dkv, layout.with_transposed(), tensors, scale, softcap, gradients, split=split.to(p_sums=sums)
            )
    if split is None or sums is None:
        return
    sum_parts(sums[:, : kv_block * head_dim], dk, split, layout, kv_block, scale)
    sum_parts(sums[:, kv_block * head_dim :], dv, split, layout, kv_block)


def _start_dq(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor,
    bias: Tensor | None,
    values: Tensor,
    dq: Tensor,
    scale: float,
    softcap: float | None,
    split: dict[str, Any] | None = None,
) -> None:
    batch, _, q_heads, head_dim = q.shape
    tma = min(layout.block_size) >= TMA_BLOCK and steps_by_tma(do, q, k, v, out)
    tiles = backward_dq_tiles(gpu_of(q.device), q.dtype, head_dim, v.shape[3], layout.block_size, tma)
    order, ordered = order_argument(layout)
    split = split or no_split(values)
    programs = (layout.q_blocks * batch * q_heads + split_programs(split)) * (layout.block_size[0] // tiles.block_m)
    _sparse_attention_bwd_dq_kernel[(programs,)](
        tile_rows(do, tiles.block_m) if tma else do,
        tile_rows(q, tiles.block_m) if tma else q,
        tile_rows(k, tiles.block_n) if tma else k,
        tile_rows(v, tiles.block_n) if tma else v,
        tile_rows(out, tiles.block_m) if tma else out,
        lse,
        dlse,
        values,
        dq,
        order,
        *layout_arguments(layout),
        **split,
        **shared_arguments(layout, do, q, k, v, values, bias, scale, softcap),
        out_strides=strides_of(out),
        stride_dlb=dlse.stride(0),
        stride_dlh=dlse.stride(1),
        stride_dln=dlse.stride(2),
        span=query_span(q.shape[2] // k.shape[2]),
        ORDERED=ordered,
        TMA=tma,
        HELD=dq_from_registers(gpu_of(q.device), tiles, head_dim, v.shape[3], tma),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **gpu_of(q.device).limit_registers(tiles.max_registers),
    )


def _start_dkv(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    bias: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    softcap: float | None,
    gradients: str,
    split: dict[str, Any] | None = None,
) -> None:
    tma = min(layout.block_size) >= TMA_BLOCK and steps_by_tma(do, q, k, v)
    choose = backward_dv_tiles if gradients == "dv" else backward_dkv_tiles
    tiles = choose(gpu_of(q.device), q.dtype, q.shape[3], v.shape[3], layout.block_size, tma)
    split = split or no_split(dk)
    per_block = layout.block_size[1] // tiles.block_n
    programs = (layout.kv_blocks * k.shape[0] * k.shape[2] + split_programs(split)) * per_block
    _sparse_attention_bwd_dkv_kernel[(programs,)](
        tile_rows(do, tiles.block_m) if tma else do,
        tile_rows(q, tiles.block_m) if tma else q,
        tile_rows(k, tiles.block_n) if tma else k,
        tile_rows(v, tiles.block_n) if tma else v,
        tile_values(values, tiles.block_m) if tma else values,
        dk,
        dv,
        *transposed_arguments(layout),
        **split,
        **shared_arguments(layout, do, q, k, v, values, bias, scale, softcap),
        span=dkv_span(layout.kv_blocks * per_block, gpu_of(q.device).processors),
        TMA=tma,
        STAGED=dkv_in_stages(gpu_of(q.device), tiles, q.shape[3], v.shape[3], tma),
        PER_HEAD=q.dtype == torch.float32,
        GRADIENTS=gradients,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **gpu_of(q.device).limit_registers(tiles.max_registers),
    )
