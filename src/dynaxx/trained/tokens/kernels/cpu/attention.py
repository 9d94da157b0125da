# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on the CPU: pass the tensors to the core, or gather in torch.

The core reads keys and values head by head, as rows of whole fp32 vectors. T queries, M keys, Hq / Hk / Hs query, kv
and selection heads, n slots, D / E head_dim of q, k and v.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.status import raise_for_status
from dynaxx.core.structures import structure
from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.runtime.core_arguments import ELEMENTS, readable
from dynaxx.layout.host import address, never_traced, on_host
from dynaxx.trained.tokens.spans import TokenSpans

latent_backward = None

ROW = 16  # floats that rows of keys and values are filled up to: a whole vector of any instruction set
GATHERED_BYTES = 64 << 20  # of rows gathered at once where there is no core
TokenArgs = structure("TokenArgs")
TokenForwardArgs = structure("TokenForwardArgs")
TokenBackwardArgs = structure("TokenBackwardArgs")


@dataclass(frozen=True)
class CpuTokenPlan:
    """A selection and its sequences, in the form that the core reads."""

    chosen: Tensor  # (T, Hs, n) int32 contiguous
    spans: TokenSpans
    ends_q: Tensor  # (num_seqs + 1,) int64
    ends_k: Tensor


@on_host
def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> CpuTokenPlan:
    """Return the plan that forward and backward share."""
    return CpuTokenPlan(
        block_indices.contiguous(),
        spans,
        torch.tensor(spans.ends_q, dtype=torch.int64),
        torch.tensor(spans.ends_k, dtype=torch.int64),
    )


@on_host
@never_traced
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: CpuTokenPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32, as `kernels.tokens.reference.attention`."""
    library = active_library()
    if library is None:
        return _by_chunks(q, k, v, plan, scale, softcap, sinks)
    q, k_rows, v_rows = readable(q), *_rows_of(k, v)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    logits = None if sinks is None else sinks.detach().float().contiguous()
    common = _arguments(q, k_rows, v_rows, v.shape[2], plan, scale, softcap)
    args = TokenForwardArgs(
        common,
        address(out, q.dtype, out.shape),
        address(lse, torch.float32, lse.shape),
        None if logits is None else address(logits, torch.float32, (q.shape[1],)),
    )
    raise_for_status(library.dynaxx_cpu_token_forward(byref(args)))
    return out, lse


@on_host
@never_traced
def backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: CpuTokenPlan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v; bitwise the same on any number of threads."""
    library = active_library()
    if library is None:
        return _gradients_by_chunks(do, dlse, saved, plan, scale, softcap)
    q, k, v, out, lse = saved
    q, do, lse = readable(q), readable(do), lse.contiguous()
    k_rows, v_rows = _rows_of(k, v)
    delta = torch.linalg.vecdot(do.float(), out.float()).T - dlse.masked_fill(lse == -torch.inf, 0.0)
    delta = delta.contiguous()
    d_row, e_row = _whole(q.shape[2]), _whole(v.shape[2])
    dq = torch.zeros(*q.shape[:2], d_row, dtype=torch.float32)
    dk, dv = (torch.zeros(k.shape[1], k.shape[0], row, dtype=torch.float32) for row in (d_row, e_row))
    turns = torch.zeros(k.shape[1] * q.shape[0], dtype=torch.int32)
    args = TokenBackwardArgs(
        _arguments(q, k_rows, v_rows, v.shape[2], plan, scale, softcap),
        address(do, q.dtype, (*q.shape[:2], v.shape[2]), strided=True),
        (c_int64 * 3)(0, *do.stride()[:2]),
        address(lse, torch.float32, (q.shape[1], q.shape[0])),
        address(delta, torch.float32, lse.shape),
        address(dq, torch.float32, dq.shape),
        address(dk, torch.float32, dk.shape),
        address(dv, torch.float32, dv.shape),
        d_row,
        e_row,
        address(turns, torch.int32, turns.shape),
    )
    raise_for_status(library.dynaxx_cpu_token_backward(byref(args)))
    narrow = lambda grad, like: grad[..., : like.shape[2]].to(like.dtype)
    return narrow(dq, q), narrow(dk.transpose(0, 1), k), narrow(dv.transpose(0, 1), v)


@never_traced
def check_rows(block_indices: Tensor, limits: Tensor) -> tuple[int, int] | None:
    """Check contiguous block indices (T, Hs, n) int32 on the CPU in one pass; return None without a core.

    Returns:
        The first of the T * Hs rows with a number that is neither -1 nor below its query's limit, and the first row
        that is not ascending with -1 at the end; -1 if there is none.
    """
    library = active_library()
    if library is None:
        return None
    queries, heads, slots = block_indices.shape
    found = (c_int64 * 2)(-1, -1)
    chosen, ends = address(block_indices, torch.int32, block_indices.shape), address(limits, torch.int32, (queries,))
    threads = torch.get_num_threads()
    raise_for_status(library.dynaxx_cpu_token_check(chosen, queries * heads, slots, ends, heads, threads, found))
    return found[0], found[1]


def _whole(width: int) -> int:
    return -(-width // ROW) * ROW


def _rows_of(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v as (Hk, M, row) fp32, zero beyond head_dim; v is part of k if it shares k's memory (MLA)."""
    k_rows = _head_major(k)
    shares = v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[2] <= k.shape[2]
    return k_rows, k_rows if shares and v.dtype == k.dtype else _head_major(v)


def _head_major(x: Tensor) -> Tensor:
    tokens, heads, width = x.shape
    rows = x.transpose(0, 1)
    if x.dtype == torch.float32 and rows.is_contiguous() and width == _whole(width):
        return rows
    made = torch.empty(heads, tokens, _whole(width), dtype=torch.float32, device="cpu")
    made[..., :width] = rows
    made[..., width:] = 0.0
    return made


def _arguments(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, head_dim_v: int, plan: CpuTokenPlan, scale: float, softcap: float | None
) -> Structure:
    return TokenArgs(
        address(q, q.dtype, (plan.spans.ends_q[-1], *q.shape[1:]), strided=True),
        address(k_rows, torch.float32, (k_rows.shape[0], plan.spans.ends_k[-1], k_rows.shape[2])),
        address(v_rows, torch.float32, (*k_rows.shape[:2], v_rows.shape[2])),
        address(plan.chosen, torch.int32, (q.shape[0], *plan.chosen.shape[1:])),
        address(plan.ends_q, torch.int64, plan.ends_q.shape),
        address(plan.ends_k, torch.int64, plan.ends_q.shape),
        ELEMENTS[q.dtype],
        len(plan.ends_q) - 1,
        q.shape[1],
        k_rows.shape[0],
        plan.chosen.shape[1],
        q.shape[2],
        head_dim_v,
        plan.chosen.shape[2],
        plan.spans.block_size,
        k_rows.shape[2],
        v_rows.shape[2],
        (c_int64 * 3)(0, *q.stride()[:2]),
        scale,
        softcap or 0.0,
        torch.get_num_threads(),
    )


# ---- without a core: gathers in torch, a few queries at a time ----


def _chunks(q: Tensor, k: Tensor, v: Tensor, plan: CpuTokenPlan) -> list[slice]:
    keys = max(1, plan.chosen.shape[2] * plan.spans.block_size)
    step = max(1, GATHERED_BYTES // (4 * keys * max(plan.chosen.shape[1], k.shape[1]) * (k.shape[2] + v.shape[2])))
    return [slice(at, min(at + step, q.shape[0])) for at in range(0, q.shape[0], step)]


def _chosen_keys(plan: CpuTokenPlan, some: slice, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return rows of k (units, t, keys) and whether they are visible; units = max(select_heads, kv_heads)."""
    spans, chosen = plan.spans, plan.chosen[some].long()
    key = chosen[..., None] * spans.block_size + torch.arange(spans.block_size, device="cpu")
    visible = (chosen >= 0)[..., None] & (key <= spans.position[some, None, None, None])
    rows = torch.where(visible, key + spans.first_key[some, None, None, None], 0)
    repeat = max(1, kv_heads // chosen.shape[1])
    merge = lambda x: x.flatten(2).transpose(0, 1).repeat_interleave(repeat, 0)
    return merge(rows), merge(visible)


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Return (units, t, keys, D) of x (M, Hk, D)."""
    units = rows.shape[0]
    head = torch.arange(units, device="cpu")[:, None, None] * x.shape[1] // units
    return x.float()[rows, head] if x.shape[0] else x.new_zeros(*rows.shape, x.shape[2]).float()


def _scores(
    q: Tensor, k: Tensor, plan: CpuTokenPlan, some: slice, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores (units, t, G, keys), -inf where hidden, the slope of the cap, the rows and gathered keys."""
    rows, visible = _chosen_keys(plan, some, k.shape[1])
    keys = _gathered(k, rows)
    grouped = q[some].float().unflatten(1, (rows.shape[0], -1)).transpose(0, 1)
    scores = grouped @ keys.mT * scale
    slope = torch.ones((), dtype=torch.float32, device="cpu")
    if softcap is not None:
        capped = (scores / softcap).tanh()
        scores, slope = softcap * capped, 1 - capped.square()
    return scores.masked_fill(~visible[:, :, None], -torch.inf), slope, rows, keys


def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, plan: CpuTokenPlan, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -torch.inf).float()
    for some in _chunks(q, k, v, plan):
        scores, _, rows, _ = _scores(q, k, plan, some, scale, softcap)
        if sinks is not None:
            logits = sinks.float().view(rows.shape[0], 1, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, logits], -1)
        total = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:3], -torch.inf)
        weights = (scores - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp()
        part = weights[..., : rows.shape[2]] @ _gathered(v, rows)
        out[some] = part.transpose(0, 1).flatten(1, 2).to(q.dtype)
        lse[:, some] = total.transpose(1, 2).flatten(0, 1)
    return out, lse


def _gradients_by_chunks(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: CpuTokenPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    dq = torch.zeros(q.shape, dtype=torch.float32, device="cpu")
    dk, dv = (
        torch.zeros(k.shape, dtype=torch.float32, device="cpu"),
        torch.zeros(v.shape, dtype=torch.float32, device="cpu"),
    )
    delta = torch.linalg.vecdot(do.float(), out.float()).T - dlse.masked_fill(lse == -torch.inf, 0.0)
    for some in _chunks(q, k, v, plan):
        scores, slope, rows, keys = _scores(q, k, plan, some, scale, softcap)
        split = lambda x, some=some, units=rows.shape[0]: x[some].float().unflatten(1, (units, -1)).transpose(0, 1)
        by_row = lambda x, some=some, units=rows.shape[0]: (
            x[:, some].unflatten(0, (units, -1)).transpose(1, 2)[..., None]
        )
        base = by_row(lse)
        weights = (scores - base.masked_fill(base == -torch.inf, 0.0)).exp()
        grad = split(do)
        ds = weights * (grad @ _gathered(v, rows).mT - by_row(delta)) * slope * scale
        dq[some] = (ds @ keys).transpose(0, 1).flatten(1, 2)
        head = (torch.arange(rows.shape[0], device="cpu")[:, None, None] * k.shape[1] // rows.shape[0]).expand_as(rows)
        dk.index_put_((rows, head), ds.mT @ split(q), accumulate=True)
        dv.index_put_((rows, head), weights.mT @ grad, accumulate=True)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
