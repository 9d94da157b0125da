# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention backward for Hopper, in one pass (`backward_fused`) or in two passes.

    one pass     rows: lse, delta -> fused: dk, dv, and fp32 sums of dq -> sums: dq
    two passes   rows: lse, delta -> backward_dq over the layout -> backward_dkv over its transpose

One pass is used for kv blocks of 128, unless they are few or torch is set to deterministic algorithms. Two passes use
no atomics, so every run gives the same bits. TMA clips at the end of each sequence, so tiles need no bound
checks; queries past the end have lse = inf and contribute nothing.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dynaxx.kernels.attention.hopper.backward_columns import divided_columns
from dynaxx.kernels.attention.hopper.backward_dkv import backward_dkv, group_pieces, known_reach
from dynaxx.kernels.attention.hopper.backward_dq import backward_dq
from dynaxx.kernels.attention.hopper.backward_fused import FUSED, FUSED_LAST_FIRST
from dynaxx.kernels.attention.hopper.backward_rows import BackwardCall, dq_of_sums, rows_of
from dynaxx.kernels.attention.hopper.config import backward_in_one_pass
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.descriptors import dense_rows
from dynaxx.kernels.runtime.arguments import zeros_like_lse
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.schedule.split import split_rows
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, like `kernels.attention.triton.backward.attention_backward`."""
    if out.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    do, q, k, v, out = (dense_rows(x) for x in (do, q, k, v, out))
    dlse = zeros_like_lse(lse, layout) if dlse is None else dlse
    one_pass = in_one_pass(q, k, layout)
    pieces, columns = divided_columns(q, k, layout, group_pieces(q, k, layout, one_pass))
    split = columns, None if one_pass else split_rows(layout, q.shape[0], q.shape[2])
    lists = [x for lines in split if lines is not None for x in (lines.parts, lines.lines)]
    tensors = (do, dlse, q, k, v, out, lse.contiguous(), *lists)
    settings = (pieces, columns is None, scale, softcap, one_pass)
    found: tuple[Tensor, Tensor, Tensor] = record_or_replay(_gradients, layout.with_transposed(), tensors, *settings)
    return found


def _gradients(
    layout: BlockLayout, do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch all kernels. `rest` begins with lists of split lines and settings, on which the launches depend."""
    *_, scale, softcap, one_pass = rest
    rows = rows_of(do, out, dlse, lse, layout, q.shape[3], one_pass)
    dq, dk, dv = gradients_of_rows(BackwardCall(do, q, k, v, rows, layout, scale, softcap))
    if rows.sums is not None:
        dq = dq_of_sums(rows.sums, q, layout, scale)
    assert dq is not None, "dq is computed directly or from its sums"
    return dq, dk, dv


def gradients_of_rows(call: BackwardCall) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return dq, dk, dv, contiguous. If the rows have sums, dq is added to them instead."""
    if call.rows.sums is None:
        return backward_dq(call), *backward_dkv(call)
    pieces = group_pieces(call.q, call.k, call.layout, True)
    apart = 1 < pieces == call.q.shape[2] // call.k.shape[2]
    return None, *(FUSED_LAST_FIRST if apart else FUSED).gradients(call, pieces)


def in_one_pass(q: Tensor, k: Tensor, layout: BlockLayout) -> bool:
    """Return whether one kernel computes all gradients, with dq in the form of sums."""
    programs = layout.kv_blocks * q.shape[0] * q.shape[2]
    rows = layout.layout_batch * layout.layout_heads * layout.q_blocks
    entries = layout.kv_indices.numel() / max(1, rows) if known_reach(layout) is None else math.inf
    fit = backward_in_one_pass(layout.block_size[1], q.shape[3], entries, programs, processors(q.device))
    return fit and not torch.are_deterministic_algorithms_enabled()
