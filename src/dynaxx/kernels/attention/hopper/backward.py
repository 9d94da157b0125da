# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention backward for Hopper, in one pass (`backward_fused`) or in two passes.

    one pass     rows: lse, delta -> fused: dk, dv, and fp32 sums of dq -> sums: dq
    two passes   rows: lse, delta -> backward_dq over the layout -> backward_dkv over its transpose

One pass is used for kv blocks of 128, unless they are few or torch is set to deterministic algorithms. Two passes use
no atomics, so every run gives the same bits. TMA clips at the end of each sequence, so tiles need no bound
checks; queries past the end have lse = inf and contribute nothing.

Legend: B batch; N queries, M keys; Hq, Hk query and kv heads; D head_dim.
"""

import torch
from torch import Tensor

from dynaxx.kernels.attention.hopper.backward_dkv import backward_dkv, group_pieces
from dynaxx.kernels.attention.hopper.backward_dq import backward_dq
from dynaxx.kernels.attention.hopper.backward_fused import FUSED, FUSED_LAST_FIRST
from dynaxx.kernels.attention.hopper.backward_rows import BackwardRows, dq_of_sums, rows_of
from dynaxx.kernels.attention.hopper.config import backward_in_one_pass, tile_width
from dynaxx.kernels.device import processors
from dynaxx.kernels.primitives.hopper.descriptors import dense_rows
from dynaxx.kernels.runtime.arguments import zeros_like_lse
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
    rows = rows_of(do, out, dlse, lse, layout, tile_width(q.shape[3]), in_one_pass(q, k, layout))
    dq, dk, dv = gradients_of_rows(do, q, k, v, rows, layout, scale, softcap)
    if rows.sums is not None:
        dq = dq_of_sums(rows.sums, q, layout, scale)
    assert dq is not None, "dq is computed directly or from its sums"
    return dq, dk, dv


def gradients_of_rows(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: BackwardRows,
    layout: BlockLayout,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return dq, dk, dv, contiguous, of tensors that TMA can read. If `rows` have sums, dq is added to them instead."""
    given = (do, q, k, v, rows, layout, scale, softcap)
    if rows.sums is None:
        return backward_dq(*given), *backward_dkv(*given)
    pieces = group_pieces(q, k, layout, True)
    apart = 1 < pieces == q.shape[2] // k.shape[2]
    return None, *(FUSED_LAST_FIRST if apart else FUSED).gradients(*given, pieces)


def in_one_pass(q: Tensor, k: Tensor, layout: BlockLayout) -> bool:
    """Return whether one kernel computes all gradients, with dq in the form of sums."""
    programs = layout.kv_blocks * q.shape[0] * q.shape[2]
    fit = backward_in_one_pass(layout.block_size[1], tile_width(q.shape[3]), programs, processors(q.device))
    return fit and not torch.are_deterministic_algorithms_enabled()
