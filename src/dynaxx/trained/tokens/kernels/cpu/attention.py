# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen tokens on the CPU: pass the tensors to the core, or compute the definition.

The core reads keys and values head by head, as rows of whole fp32 vectors. T queries, M keys, Hq / Hk / Hs query, kv
and selection heads, n slots, D / E head_dim of q, k and v.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.structures import raise_for_status, structure
from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.runtime.core_arguments import ELEMENTS, readable
from dynaxx.layout.host import address, never_traced, on_host
from dynaxx.trained.tokens.kernels.reference import attention as reference
from dynaxx.trained.tokens.spans import TokenSpans

latent_backward = None

ROW = 16  # floats that rows of keys and values are filled up to: a whole vector of any instruction set
SCORE_BYTES = 32 << 20  # of scores held at once where there is no core
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


# ---- without a core: the definition, a few queries at a time ----


def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, plan: CpuTokenPlan, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -torch.inf).float()
    if sinks is not None:
        lse[:] = sinks[:, None]
    for some, keys, own in plan.spans.pieces(4 * q.shape[1], SCORE_BYTES):
        mask = reference.token_mask(plan.chosen[some], own)
        out[some], lse[:, some] = reference.forward(q[some], k[keys], v[keys], mask, scale, softcap, sinks)
    return out, lse


def _gradients_by_chunks(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: CpuTokenPlan, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device="cpu") for x in (q, k, v))
    for some, keys, own in plan.spans.pieces(4 * q.shape[1], SCORE_BYTES):
        part = SavedForward(q[some].float(), k[keys].float(), v[keys].float(), out[some], lse[:, some])
        mask = reference.token_mask(plan.chosen[some], own)
        dq[some], dk_part, dv_part = reference.backward(do[some], dlse[:, some], part, mask, scale, softcap)
        dk[keys] += dk_part
        dv[keys] += dv_part
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
