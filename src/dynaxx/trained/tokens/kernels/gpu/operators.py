# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens, the part that both GPU backends share: `kernels.tokens.contract.TokenKernels`.

T queries, M keys, Hq / Hk / Hs query, kv and selection heads, n slots, D / E head_dim of q, k and v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.kernels.sinks import include_sinks
from dynaxx.trained.tokens.kernels.gpu.config import WIDE, forward_launch, widths
from dynaxx.trained.tokens.kernels.gpu.forward import _token_fwd_kernel
from dynaxx.trained.tokens.kernels.gpu.gradients import TileGradients, WideSteps, token_backward
from dynaxx.trained.tokens.kernels.gpu.plan import TokenPlan
from dynaxx.trained.tokens.kernels.gpu.primitives import ListTables


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TokenPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32, as `kernels.tokens.reference.attention`."""
    q, k, v = (unit_stride(x) for x in (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    latent, gpu = shares_rows(k, v), gpu_of(q.device)
    if q.shape[0]:
        _token_fwd_kernel[(len(plan.tiles), plan.units, plan.rows.parts)](
            q,
            k,
            v,
            out,
            lse,
            out_strides=packed_strides_of(out),
            LATENT=latent,
            **shared_arguments(q, k, v, plan, scale, softcap),
            **forward_launch(gpu, max(q.shape[2], v.shape[2]), q.itemsize, latent).options(gpu),
        )
    if sinks is not None:
        out, lse = (x[0] for x in include_sinks(out[None], lse[None], sinks))
    return out, lse


def backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: TokenPlan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v; bitwise reproducible."""
    dq, grads = gradients(do, dlse, saved, plan, (scale, softcap), False)
    return dq, grads[0], grads[1]


def latent_backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: TokenPlan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return dq and dk, which contains the gradient of v = k[..., :E]."""
    joined = shares_rows(saved.k, saved.v) and saved.q.shape[2] > WIDE
    dq, grads = gradients(do, dlse, saved, plan, (scale, softcap), joined)
    return dq, grads[0] if joined else added(*grads)


def added(dk: Tensor, dv: Tensor) -> Tensor:
    """Return dk with dv added to its first columns."""
    dk[..., : dv.shape[2]] += dv
    return dk


def gradients(
    do: Tensor,
    dlse: Tensor,
    saved: SavedForward,
    plan: TokenPlan,
    settings: tuple[float, float | None],
    joined: bool,
    steps: WideSteps | TileGradients | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return dq, and dk and dv, or their sum if `joined`.

    Args:
        do: gradient of out.
        dlse: gradient of lse.
        saved: the forward.
        plan: the selection.
        settings: scale and softcap.
        joined: v is the first part of k in memory, and head_dim above `WIDE`.
        steps: what to use instead of the functions of `gradients.py`; see there.
    """
    q, k, v, out = (unit_stride(x) for x in saved[:4])
    saved = SavedForward(q, k, v, out, saved.lse.contiguous())
    if not (q.shape[0] and k.shape[0] and plan.lists.shape[2]):
        return torch.zeros_like(q), [torch.zeros_like(x) for x in ((k,) if joined else (k, v))]
    arguments = shared_arguments(q, k, v, plan, *settings)
    return token_backward(unit_stride(do), dlse, saved, plan, arguments, shares_rows(k, v), joined, steps)


def shares_rows(k: Tensor, v: Tensor) -> bool:
    """Return whether values are the first part of the keys, in the same memory, as in latent attention (MLA)."""
    same = k.data_ptr() == v.data_ptr() and k.dtype == v.dtype and same_rows(k, v)
    return same and k.shape[2] > v.shape[2] and v.shape[2] == widths(k.shape[2])[0] == widths(v.shape[2])[0]


def same_rows(k: Tensor, v: Tensor) -> bool:
    """Return whether k and v have equal strides; the stride of a dimension of length 1 does not matter."""
    return k.shape[:-1] == v.shape[:-1] and all(
        a == b or size == 1 for a, b, size in zip(k.stride(), v.stride(), v.shape, strict=True)
    )


def shared_arguments(
    q: Tensor, k: Tensor, v: Tensor, plan: TokenPlan, scale: float, softcap: float | None
) -> dict[str, Any]:
    """Return the arguments that kernels by tile of queries share."""
    (d_a, d_b), (e_a, e_b) = widths(q.shape[2]), widths(v.shape[2])
    counts = plan.lists if plan.counts is None else plan.counts
    return {
        "lists": ListTables(plan.lists, plan.marks, counts, plan.tiles, plan.position, plan.first_key),
        "queries": q.shape[0],
        "units": plan.units,
        "select_heads": plan.lists.shape[1],
        "kv_heads": k.shape[1],
        "slots": plan.lists.shape[2],
        "group_size": q.shape[1] // plan.units,
        "scale": scale,
        "softcap": softcap or 1.0,
        "q_strides": packed_strides_of(q),
        "k_strides": packed_strides_of(k),
        "v_strides": packed_strides_of(v),
        "D": q.shape[2],
        "E": v.shape[2],
        "D_A": d_a,
        "D_B": d_b,
        "E_A": e_a,
        "E_B": e_b,
        "GRAIN": plan.block_size,
        "PER_TILE": plan.rows.per_tile,
        "PART": plan.rows.part,
        "ROWS": plan.rows.rows,
        "CAPPED": softcap is not None,
        "EXACT": q.dtype == torch.float32,
    }
