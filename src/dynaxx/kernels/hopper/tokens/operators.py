# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on Hopper: special kernels for latent attention, the portable kernels for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.gpu.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.kernels.gpu.tokens import operators as portable
from dynaxx.kernels.gpu.tokens.plan import TokenPlan, prepare
from dynaxx.kernels.hopper.tokens import latent, latent_scores
from dynaxx.kernels.hopper.tokens.gather import REST, ROWS, WIDE
from dynaxx.kernels.hopper.tokens.latent import _token_latent_kernel
from dynaxx.kernels.hopper.tokens.latent_scores import _token_latent_scores_kernel
from dynaxx.kernels.sinks import include_sinks

__all__ = ["backward", "forward", "latent_backward", "prepare"]
LOG2E = 1.4426950408889634


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
    q, k, v = (unit_stride(x) for x in (q, k, v))
    if softcap is not None or not q.shape[0] or not fits(q, k, v, plan):
        return portable.forward(q, k, v, plan, scale, softcap, sinks)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    _token_latent_kernel[(q.shape[0] * plan.rows.parts,)](
        q,
        k,
        out,
        lse,
        plan.lists,
        plan.position,
        plan.first_key,
        queries=q.shape[0],
        slots=plan.lists.shape[2],
        group_size=q.shape[1],
        parts=plan.rows.parts,
        scale_log2=scale * LOG2E,
        q_strides=packed_strides_of(q),
        k_strides=packed_strides_of(k),
        out_strides=packed_strides_of(out),
        num_warps=latent.WARPS,
        maxnreg=latent.MOST_REGISTERS,
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
    """Return dq, dk, dv in the dtypes of q, k, v; bitwise reproducible."""
    given = (do, dlse, (q, k, v), (out, lse), plan, (scale, softcap), False)
    dq, grads = portable.gradients(*given, _scores(q, k, v, plan, softcap))
    return dq, grads[0], grads[1]


def latent_backward(
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
) -> tuple[Tensor, Tensor]:
    """Return dq and dk, which contains the gradient of v = k[..., :E]."""
    scores = _scores(q, k, v, plan, softcap)
    if scores is None:
        return portable.latent_backward(do, dlse, q, k, v, out, lse, plan, scale, softcap)
    dq, grads = portable.gradients(do, dlse, (q, k, v), (out, lse), plan, (scale, softcap), True, scores)
    return dq, grads[0]


def fits(q: Tensor, k: Tensor, v: Tensor, plan: TokenPlan) -> bool:
    """Return whether the kernels for latent attention serve: 33 or more q heads over one latent vector per token."""
    widths = (q.shape[2], v.shape[2]) == (WIDE.value + REST.value, WIDE.value)
    alone = k.shape[1] == plan.lists.shape[1] == plan.rows.per_tile == plan.block_size == 1
    steps = k.stride(0) % 16 == 0 and k.data_ptr() % 16 == 0  # rows are copied 16 bytes at a time
    return widths and alone and steps and plan.rows.rows == ROWS.value and portable.shares_rows(k, v)


def _scores(q: Tensor, k: Tensor, v: Tensor, plan: TokenPlan, softcap: float | None) -> Any:
    """Return `_write_scores` if it can serve, else None."""
    return _write_scores if softcap is None and fits(unit_stride(q), k, v, plan) else None


def _write_scores(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    ds: Tensor,
    plan: TokenPlan,
    heads: range,
    tiles: range,
    arguments: dict[str, Any],
    latent: bool,
) -> None:
    q, k, _ = inputs
    only = ("p_do", "p_lse", "p_delta", "scale", "queries", "slots", "q_strides", "k_strides", "do_strides")
    _token_latent_scores_kernel[(len(tiles) * plan.rows.parts,)](
        q,
        k,
        p_weights=weights,
        p_ds=ds,
        p_chosen=plan.lists,
        p_position=plan.position,
        p_first_key=plan.first_key,
        group_size=q.shape[1],
        parts=plan.rows.parts,
        first_query=tiles.start,
        num_warps=latent_scores.WARPS,
        **{name: arguments[name] for name in only},
    )
