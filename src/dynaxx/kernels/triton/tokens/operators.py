# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on any GPU: `kernels.contract.TokenKernels`. Its speed was never measured.

T queries, M keys, Hq / Hk / Hs query, kv and selection heads, n slots, D / E head_dim of q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.gpu.device import padded, power_of_two
from dynaxx.kernels.sinks import include_sinks
from dynaxx.kernels.triton.tokens.backward import _token_bwd_dkv_kernel, _token_bwd_dq_kernel
from dynaxx.kernels.triton.tokens.forward import _token_fwd_kernel
from dynaxx.layout.tokens import TokenSpans

MOST_ROWS = 64  # q heads of a program


@dataclass(frozen=True)
class TokenPlan:
    """A selection on its device, and where its queries stand."""

    chosen: Tensor  # (T, Hs, n) int32 contiguous
    position: Tensor  # (T,) int32
    first_key: Tensor  # (T,) int32
    block_size: int


def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
    """Return what forward and backward share. Numbers in any order will do; those out of range are never read."""
    place = lambda x: x.to(torch.int32).to(q.device, non_blocking=True)
    return TokenPlan(block_indices.contiguous(), place(spans.position), place(spans.first_key), spans.block_size)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TokenPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32, as `kernels.reference.tokens`."""
    q, k, v = (_dense_rows(x) for x in (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    grid, shared = _shared(q, k, v, plan, scale, softcap)
    if q.shape[0]:
        _token_fwd_kernel[grid](
            q,
            k,
            v,
            out,
            lse,
            stride_on=out.stride(0),
            stride_oh=out.stride(1),
            **shared,
        )
    if sinks is not None:
        out, lse = (x[0] for x in include_sinks(out[None], lse[None], sinks))
    return out, lse


def backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: TokenPlan,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v: the same bits at every call."""
    q, k, v, do = (_dense_rows(x) for x in (q, k, v, do))
    delta = torch.linalg.vecdot(do.float(), out.float()).T - dlse.masked_fill(lse == -torch.inf, 0.0)
    lse, delta = lse.contiguous(), delta.contiguous()
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not (q.shape[0] and k.shape[0]):
        return dq, dk, dv
    grid, shared = _shared(q, k, v, plan, scale, softcap)
    grads = {"p_do": do, "p_lse": lse, "p_delta": delta, "stride_don": do.stride(0), "stride_doh": do.stride(1)}
    _token_bwd_dq_kernel[grid](
        q,
        k,
        v,
        p_dq=dq,
        stride_dqn=dq.stride(0),
        stride_dqh=dq.stride(1),
        **grads,
        **shared,
    )
    entries, begin = entries_of_keys(plan, k.shape[0], k.shape[1], shared["units"])
    group = power_of_two(shared["group_size"])
    not_by_key = ("p_chosen", "p_position", "p_first_key", "select_heads", "slots", "GRAIN", "BLOCK_N", "ROWS")
    _token_bwd_dkv_kernel[(k.shape[0], k.shape[1])](
        q,
        k,
        v,
        p_dk=dk,
        p_dv=dv,
        p_entries=entries,
        p_begin=begin,
        keys=k.shape[0],
        GROUP=group,
        ROWS=max(16, min(group, 64)) if group > 16 else 16,
        **grads,
        **{name: value for name, value in shared.items() if name not in not_by_key},
    )
    return dq, dk, dv


def entries_of_keys(plan: TokenPlan, keys: int, kv_heads: int, units: int) -> tuple[Tensor, Tensor]:
    """Return who chose each key: entries t * U + u, U units of a kv head each, by (kv head, key), and where they begin.

    Nothing is read back from the device: what is not visible sorts behind everything.
    """
    chosen, size = plan.chosen.long(), plan.block_size
    queries, heads = chosen.shape[:2]
    key = (chosen * size)[..., None] + torch.arange(size, device=chosen.device)
    visible = (chosen >= 0)[..., None] & (key <= plan.position[:, None, None, None])
    row = torch.where(visible, key + plan.first_key[:, None, None, None], kv_heads * keys).flatten(2)
    own = units // kv_heads
    unit = torch.arange(units, device=chosen.device)
    row = row[:, unit * heads // units]  # (T, units, n * size)
    row = torch.where(row < kv_heads * keys, row + (unit // own * keys)[:, None], kv_heads * keys)
    entry = torch.arange(queries, device=chosen.device)[:, None] * own + unit % own
    order = row.flatten().sort(stable=True)
    entries = entry[..., None].expand_as(row).flatten()[order.indices].int()
    cells = torch.arange(kv_heads * keys + 1, device=chosen.device)
    return entries, torch.searchsorted(order.values, cells).int()


def _dense_rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension: x itself, or a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _parts(width: int) -> tuple[int, int]:
    """Cut a width into a power of two and a rest, 0 for none: 576 = 512 + 64. Small rests are padding instead."""
    most = 1 << (width.bit_length() - 1)
    if width <= 128 or most == width:
        return padded(width), 0
    return most, padded(width - most)


def _shared(
    q: Tensor, k: Tensor, v: Tensor, plan: TokenPlan, scale: float, softcap: float | None
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of kernels by query, and the arguments that they share."""
    units = max(plan.chosen.shape[1], k.shape[1])
    group_size = q.shape[1] // units
    (d_a, d_b), (e_a, e_b) = _parts(q.shape[2]), _parts(v.shape[2])
    wide = max(d_a, e_a) > 256  # sums of more rows would not fit the registers
    rows = 16 if wide else max(16, min(MOST_ROWS, power_of_two(group_size)))
    return (q.shape[0], units, -(-group_size // rows)), {
        "p_chosen": plan.chosen,
        "p_position": plan.position,
        "p_first_key": plan.first_key,
        "queries": q.shape[0],
        "units": units,
        "select_heads": plan.chosen.shape[1],
        "kv_heads": k.shape[1],
        "slots": plan.chosen.shape[2],
        "group_size": group_size,
        "scale": scale,
        "softcap": softcap or 1.0,
        "stride_qn": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_kn": k.stride(0),
        "stride_kh": k.stride(1),
        "stride_vn": v.stride(0),
        "stride_vh": v.stride(1),
        "D": q.shape[2],
        "E": v.shape[2],
        "D_A": d_a,
        "D_B": d_b,
        "E_A": e_a,
        "E_B": e_b,
        "GRAIN": plan.block_size,
        "ROWS": rows,
        "BLOCK_N": 16 if wide else 32,
        "CAPPED": softcap is not None,
        "num_warps": 8 if wide else 4,
    }
