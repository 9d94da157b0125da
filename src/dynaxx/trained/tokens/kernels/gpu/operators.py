# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens, the part that both GPU backends share: `kernels.tokens.contract.TokenKernels`.

T queries, M keys, Hq / Hk / Hs query, kv and selection heads, n slots, D / E head_dim of q, k and v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.kernels.sinks import include_sinks
from dynaxx.trained.tokens.kernels.gpu.config import WIDE, forward_launch
from dynaxx.trained.tokens.kernels.gpu.forward import _token_fwd_kernel
from dynaxx.trained.tokens.kernels.gpu.gradients import token_backward
from dynaxx.trained.tokens.kernels.gpu.plan import TokenPlan, shared_arguments, shares_rows


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
    dq, grads = token_backward(do, dlse, saved, plan, (scale, softcap), False)
    return dq, grads[0], grads[1]


def latent_backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: TokenPlan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return dq and dk, which contains the gradient of v = k[..., :E]."""
    joined = shares_rows(saved.k, saved.v) and saved.q.shape[2] > WIDE
    dq, grads = token_backward(do, dlse, saved, plan, (scale, softcap), joined)
    return dq, grads[0] if joined else added(*grads)


def added(dk: Tensor, dv: Tensor) -> Tensor:
    """Return dk with dv added to its first columns."""
    dk[..., : dv.shape[2]] += dv
    return dk
