# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias by distance: sums of ds over pairs, in a pass over the rows of its own. See `backward`.

    q, do tile (resident) -> k, v tiles of the row stream in -> ds -> slopes: sum of -distance * ds, one per program
                                                                   table: added at each pair's distance

Tables are summed as 64-bit integers, because integers have the same sum in any order. Their unit is chosen so that no
sum can overflow: a weight is at most 1, so |ds| <= max |do| max |v| + max |delta|, and a distance has at most N pairs.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim of q and k, E head_dim of v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.attention.triton.backward_rows import cap_scores, load_row_values, shared_arguments, weights_of
from dynaxx.kernels.attention.triton.config import backward_dq_tiles
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.primitives.triton.bias import head_bias, lse_without_bias
from dynaxx.kernels.primitives.triton.tiles import (
    PARTIAL,
    head_rows,
    load_tile,
    row_entries,
    row_of,
    steps_of_pass,
    tile_of_pass,
    tile_positions,
)
from dynaxx.kernels.primitives.triton.visible import masks_of, where_visible
from dynaxx.kernels.runtime.arguments import RUNTIME_SIZES, layout_arguments
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.kernels.schedule.parts import LayoutRows
from dynaxx.layout import BlockLayout

BITS = tl.constexpr(61)  # of a sum; the rounding of a weight above 1 needs some room
MAX_EXPONENT = 100  # of the unit, so that it is a number of fp32


@triton.jit
def _add_to_table(p_sums, p_lost, ds, unit, place, size):
    """Add ds at the places of its pairs; mark sums as lost if a number is not finite or too large for the unit."""
    units = ds * unit
    fits = tl.abs(units) <= 2.0**BITS
    if tl.sum((fits == 0).to(tl.int32)) > 0:
        tl.store(p_lost, float("nan"))
    added = fits & (units != 0) & (place >= 0) & (place < size)
    tl.atomic_add(p_sums + place, tl.where(fits, units, 0.0).to(tl.int64), mask=added, sem="relaxed")


@kernel_launcher
@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _sparse_attention_bwd_bias_kernel(
    p_do,
    p_q,
    p_k,
    p_v,
    p_values,  # (B, Hq, padded_q, 2) fp32: lse and delta, written by the dq kernel
    p_sums,  # slopes: (B, Hq, tiles) fp32; table: (B, Hq, N + M - 1) int64, cleared
    p_lost,  # table: (B, Hq) fp32, cleared; NaN where sums are lost
    p_unit,  # table: fp32, what 1 is as an integer
    tables,  # `LayoutTables`
    capacity,
    num_masks,
    layout_stride_b,
    layout_stride_h,
    seqlen_q,
    padded_q,
    seqlen_k,
    batch,
    q_heads,
    group_size,
    scale,
    cap,
    do_strides,  # `Strides`
    q_strides,
    k_strides,
    v_strides,
    p_bias,
    bias_strides,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    BIAS: tl.constexpr,  # "slopes" or "table"
):
    """Add the pairs of a tile of queries of one head to the gradient of its bias."""
    layout = LayoutRows(tables, capacity, num_masks, layout_stride_b, layout_stride_h)
    q_blocks = tl.cdiv(seqlen_q, Q_BLOCK)
    tiles = q_blocks * (Q_BLOCK // BLOCK_M)
    i_head, i_tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    i_b, i_h, i_row = i_head // q_heads, i_head % q_heads, i_tile // (Q_BLOCK // BLOCK_M)
    layout_head = i_b * layout.stride_b + i_h * layout.stride_h
    start, partial, total = row_entries(layout, layout_head, i_row, q_blocks)
    row = row_of(layout, start, partial, total, seqlen_k, KV_BLOCK, BLOCK_N)
    masks = masks_of(layout)
    first_q = i_tile * BLOCK_M
    o_q = tl.arange(0, BLOCK_M)
    inner_q = first_q % Q_BLOCK + o_q
    q = head_rows(p_q, q_strides, i_b, i_h, seqlen_q, False)
    do = head_rows(p_do, do_strides, i_b, i_h, seqlen_q, False)
    k = head_rows(p_k, k_strides, i_b, i_h // group_size, seqlen_k, False)
    v = head_rows(p_v, v_strides, i_b, i_h // group_size, seqlen_k, False)
    bias = head_bias(p_bias, bias_strides, i_b, i_h, first_q, seqlen_q, seqlen_k, BIAS)
    b_q = load_tile(q, first_q, o_q, D, BLOCK_D, BLOCK_M, True, False)
    b_do = load_tile(do, first_q, o_q, E, BLOCK_E, BLOCK_M, True, False)
    lse, delta = load_row_values(p_values + i_head * padded_q * 2, first_q + o_q, seqlen_q)
    EXACT: tl.constexpr = b_q.dtype == tl.float32
    unit = 0.0
    if BIAS == "table":
        unit = tl.load(p_unit)
    sums = tl.zeros([BLOCK_M], tl.float32)
    for MASKING in tl.static_range(2):
        steps = steps_of_pass(row, MASKING)
        for i_step in range(steps[0], steps[1]):
            first, count, i_entry, is_full = tile_of_pass(i_step - steps[0], row, MASKING)
            first_k, offsets, inner_k, mask_id = tile_positions(
                tables, first, count, i_entry, seqlen_k, KV_BLOCK, BLOCK_N, MASKING
            )
            b_k = load_tile(k, first_k, offsets, D, BLOCK_D, BLOCK_N, True, False)
            b_v = load_tile(v, first_k, offsets, E, BLOCK_E, BLOCK_N, True, False)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            scores = cap_scores(scores, cap, CAPPED)[0]
            pos_q, pos_k = o_q[:, None], (first_k + offsets)[None, :]
            pair_lse = lse_without_bias(lse[:, None], bias, pos_q, pos_k, EXACT, BIAS)
            weights = weights_of(scores, pair_lse, scale, EXACT)
            if MASKING == PARTIAL:
                weights = where_visible(
                    weights, 0.0, mask_id, is_full, masks, inner_q, inner_k, first_k, offsets, seqlen_k,
                    Q_BLOCK, KV_BLOCK,
                )  # fmt: skip
            dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
            ds = weights * (dp - delta[:, None])
            if BIAS == "slopes":
                sums -= tl.sum(ds * tl.abs((bias.origin + pos_q).to(tl.float32) - pos_k.to(tl.float32)), 1)
            else:
                place = (bias.origin + pos_q).to(tl.int32) - pos_k.to(tl.int32)
                _add_to_table(p_sums + i_head * bias.size, p_lost + i_head, ds, unit, place, bias.size)
    if BIAS == "slopes":
        tl.store(p_sums + tl.program_id(0), tl.sum(sums, 0))


def add_bias_gradient(
    dbias: Tensor, tensors: tuple[Tensor, ...], layout: BlockLayout, scale: float, softcap: float | None
) -> None:
    """Add the gradient of a bias to `dbias`, the same bits in every run.

    `tensors` are do, q, k, v, the values of the dq kernel, and the bias.
    """
    do, q, _, v, values, bias = tensors
    tiles = backward_dq_tiles(gpu_of(q.device), q.dtype, q.shape[3], v.shape[3], layout.block_size, False)
    if bias.ndim == 2:
        programs = layout.q_blocks * (layout.block_size[0] // tiles.block_m)
        sums = values.new_empty(*bias.shape, programs)
        record_or_replay(_start, layout, (*tensors, sums, None, None), scale, softcap)
        dbias += sums.sum(-1)
        return
    rows = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (do, v)]
    rows.append(values[:, :, : q.shape[1], 1].abs())
    of_do, of_v, of_delta = (x.masked_fill_(~x.isfinite(), 0.0).amax() for x in rows)
    exponent = BITS.value - ((of_do * of_v + of_delta) * q.shape[1]).log2()
    unit = exponent.floor().clamp(max=MAX_EXPONENT).exp2()
    sums, lost = (
        torch.zeros_like(bias, dtype=torch.int64, memory_format=torch.contiguous_format),
        bias.new_zeros(bias.shape[:2]),
    )
    record_or_replay(_start, layout, (*tensors, sums, lost, unit), scale, softcap)
    dbias += (sums.double() / unit + lost[..., None]).to(dbias.dtype)


def _start(
    layout: BlockLayout,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    bias: Tensor,
    sums: Tensor,
    lost: Tensor | None,
    unit: Tensor | None,
    scale: float,
    softcap: float | None,
) -> None:
    tiles = backward_dq_tiles(gpu_of(q.device), q.dtype, q.shape[3], v.shape[3], layout.block_size, False)
    programs = q.shape[0] * q.shape[2] * layout.q_blocks * (layout.block_size[0] // tiles.block_m)
    _sparse_attention_bwd_bias_kernel[(programs,)](
        do,
        q,
        k,
        v,
        values,
        sums,
        sums if lost is None else lost,
        sums if unit is None else unit,
        *layout_arguments(layout),
        **shared_arguments(layout, do, q, k, v, values, bias, scale, softcap),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **gpu_of(q.device).limit_registers(tiles.max_registers),
    )
