# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on Hopper: kernels for latent and for grouped-query heads, else the portable ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.runtime.arguments import packed_strides_of, unit_stride
from dynaxx.kernels.sinks import include_sinks
from dynaxx.trained.tokens.kernels.gpu import operators as portable
from dynaxx.trained.tokens.kernels.gpu.gradients import Portion, WideSteps, token_backward, write_dq, write_rows
from dynaxx.trained.tokens.kernels.gpu.plan import TokenPlan, shares_rows
from dynaxx.trained.tokens.kernels.hopper import grouped_plan, latent, latent_dq, latent_rows, latent_scores
from dynaxx.trained.tokens.kernels.hopper.gather import REST, ROWS, WIDE
from dynaxx.trained.tokens.kernels.hopper.grouped_plan import GroupedPlan, prepare
from dynaxx.trained.tokens.kernels.hopper.latent import _token_latent_kernel
from dynaxx.trained.tokens.kernels.hopper.latent_dq import _token_latent_dq_kernel
from dynaxx.trained.tokens.kernels.hopper.latent_rows import _token_latent_rows_kernel
from dynaxx.trained.tokens.kernels.hopper.latent_scores import _token_latent_scores_kernel

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
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32, as `kernels.tokens.reference.attention`."""
    q, k, v = (unit_stride(x) for x in (q, k, v))
    if isinstance(plan, GroupedPlan):
        if softcap is not None:
            return portable.forward(q, k, v, plan.portable(q, k, v), scale, softcap, sinks)
        return grouped_plan.forward(q, k, v, plan, scale, sinks)
    if softcap is not None or not q.shape[0] or not fits(q, k, v, plan):
        return portable.forward(q, k, v, plan, scale, softcap, sinks)
    q = _aligned(q)
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
        maxnreg=latent.MAX_REGISTERS,
    )
    if sinks is not None:
        out, lse = (x[0] for x in include_sinks(out[None], lse[None], sinks))
    return out, lse


def backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: TokenPlan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v; bitwise reproducible."""
    if isinstance(plan, GroupedPlan):
        if softcap is None:
            steps = grouped_plan.narrow_rows
            dq, grads = token_backward(do, dlse, saved, plan, (scale, None), False, steps)
            return dq, grads[0], grads[1]
        plan = plan.portable(saved.q, saved.k, saved.v)
    wide_steps = _steps(saved, plan, softcap)
    if wide_steps is not None:
        saved, do = saved._replace(q=_aligned(unit_stride(saved.q))), _aligned(unit_stride(do))
        wide_steps = wide_steps._replace(rows=write_rows)
    dq, grads = token_backward(do, dlse, saved, plan, (scale, softcap), False, wide_steps)
    return dq, grads[0], grads[1]


def latent_backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: TokenPlan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return dq and dk, which contains the gradient of v = k[..., :E]."""
    if isinstance(plan, GroupedPlan):
        plan = plan.portable(saved.q, saved.k, saved.v)
    steps = _steps(saved, plan, softcap)
    if steps is None:
        return portable.latent_backward(do, dlse, saved, plan, scale, softcap)
    saved, do = saved._replace(q=_aligned(unit_stride(saved.q))), _aligned(unit_stride(do))
    dq, grads = token_backward(do, dlse, saved, plan, (scale, softcap), True, steps)
    return dq, grads[0]


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if its rows do not begin where copies of 16 bytes can begin."""
    if x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def fits(q: Tensor, k: Tensor, v: Tensor, plan: TokenPlan) -> bool:
    """Return whether the kernels for latent attention serve: 33 or more q heads over one latent vector per token."""
    widths = (q.shape[2], v.shape[2]) == (WIDE.value + REST.value, WIDE.value)
    alone = k.shape[1] == plan.lists.shape[1] == plan.rows.per_tile == plan.block_size == 1
    steps = k.stride(0) % 16 == 0 and k.data_ptr() % 16 == 0  # rows are copied 16 bytes at a time
    return widths and alone and steps and plan.rows.rows == ROWS.value and shares_rows(k, v)


def _steps(saved: SavedForward, plan: TokenPlan, softcap: float | None) -> WideSteps | None:
    """Return the steps of the backward if the kernels for latent attention serve, else None."""
    if softcap is not None or not fits(unit_stride(saved.q), saved.k, saved.v, plan):
        return None
    if plan.rows.parts % 2 or plan.lists.shape[2] % 16:
        return WideSteps(_write_scores, write_dq, write_rows)
    return WideSteps(_write_scores, _write_dq, _write_rows)


def _write_dq(portion: Portion, ds: Tensor, together: int) -> None:
    plan, dq = portion.plan, portion.dq
    pairs = plan.rows.parts // 2
    _token_latent_dq_kernel[(2 * pairs * len(portion.tiles),)](
        portion.k,
        dq,
        ds,
        plan.lists,
        plan.position,
        plan.first_key,
        slots=plan.lists.shape[2],
        width=ds.shape[1],
        group_size=dq.shape[1],
        pairs=pairs,
        first_query=portion.tiles.start,
        k_strides=portion.arguments["k_strides"],
        dq_strides=packed_strides_of(dq),
        num_warps=latent_dq.WARPS,
        maxnreg=latent_dq.MAX_REGISTERS,
    )


def _write_rows(portion: Portion, weights: Tensor, ds: Tensor, buffer: Tensor, together: int) -> None:
    plan, arguments = portion.plan, portion.arguments
    pairs = plan.rows.parts // 2
    _token_latent_rows_kernel[(2 * pairs * len(portion.tiles),)](
        portion.q,
        arguments["p_do"],
        weights,
        ds,
        buffer,
        slots=plan.lists.shape[2],
        width=weights.shape[1],
        group_size=portion.q.shape[1],
        pairs=pairs,
        first_query=portion.tiles.start,
        q_strides=arguments["q_strides"],
        do_strides=arguments["do_strides"],
        num_warps=latent_rows.WARPS,
        maxnreg=latent_rows.MAX_REGISTERS,
    )


def _write_scores(portion: Portion, weights: Tensor, ds: Tensor) -> None:
    plan = portion.plan
    only = ("p_do", "p_lse", "p_delta", "scale", "queries", "slots", "q_strides", "k_strides", "do_strides")
    _token_latent_scores_kernel[(len(portion.tiles) * plan.rows.parts,)](
        portion.q,
        portion.k,
        p_weights=weights,
        p_ds=ds,
        p_chosen=plan.lists,
        p_position=plan.position,
        p_first_key=plan.first_key,
        width=ds.shape[1],
        group_size=portion.q.shape[1],
        parts=plan.rows.parts,
        first_query=portion.tiles.start,
        num_warps=latent_scores.WARPS,
        maxnreg=latent_scores.MAX_REGISTERS,
        **{name: portion.arguments[name] for name in only},
    )
