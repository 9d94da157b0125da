# SPDX-License-Identifier: Apache-2.0
"""Forward of grouped-query heads over chosen tokens on Hopper: which problems `grouped.py` serves, and its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.kernels.gpu.runtime.arguments import packed_strides_of
from dynaxx.kernels.gpu.tokens import plan as portable_plan
from dynaxx.kernels.gpu.tokens.config import MOST_MARKS, TileRows
from dynaxx.kernels.gpu.tokens.plan import TokenPlan
from dynaxx.kernels.gpu.tokens.primitives import ListTables
from dynaxx.kernels.hopper.support import DTYPES, GROUPED, GROUPED_DIM
from dynaxx.kernels.hopper.tokens import grouped
from dynaxx.kernels.hopper.tokens.grouped import _token_grouped_kernel
from dynaxx.kernels.sinks import include_sinks
from dynaxx.layout.tokens import TokenSpans

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class GroupedPlan(TokenPlan):
    """A plan of tiles of 128 rows, and the selection, from which a backward makes a plan of its own."""

    chosen: Tensor
    spans: TokenSpans

    def portable(self, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
        """Return the plan of the portable kernels."""
        return portable_plan.prepare(self.chosen, self.spans, q, k, v)


def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
    """Return a `GroupedPlan` where `grouped.py` serves, else the plan of the portable kernels."""
    part = q.shape[1] // max(block_indices.shape[1], k.shape[1])
    if not (_fits(q, k, v) and part in GROUPED and spans.block_size == 1):
        return portable_plan.prepare(block_indices, spans, q, k, v)
    rows = TileRows(min(2 * grouped.ROWS.value // part, MOST_MARKS), part, 1)
    plan = portable_plan.prepare_rows(block_indices, spans, q, k, rows, bits=32)
    return GroupedPlan(**vars(plan), chosen=block_indices, spans=spans)


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether dtypes, widths and addresses allow copies of 16 bytes."""
    served = q.dtype in DTYPES and q.shape[2] == v.shape[2] == GROUPED_DIM and k.dtype == v.dtype == q.dtype
    wide = all(x.stride(2) == 1 and not (x.stride(0) | x.stride(1)) % 8 and not x.data_ptr() % 16 for x in (k, v))
    return served and wide


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: GroupedPlan, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32, as `kernels.reference.tokens`."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    if not q.shape[0]:
        return out, lse
    assert plan.counts is not None, "tiles of several queries"
    _token_grouped_kernel[(len(plan.tiles), plan.units)](
        q,
        k,
        v,
        out,
        lse,
        ListTables(plan.lists, plan.marks, plan.counts, plan.tiles, plan.position, plan.first_key),
        queries=q.shape[0],
        tiles=len(plan.tiles),
        units=plan.units,
        select_heads=plan.lists.shape[1],
        kv_heads=k.shape[1],
        slots=plan.lists.shape[2],
        group_size=q.shape[1] // plan.units,
        scale_log2=scale * LOG2E,
        q_strides=packed_strides_of(q),
        k_strides=packed_strides_of(k),
        v_strides=packed_strides_of(v),
        out_strides=packed_strides_of(out),
        D=q.shape[2],
        PART=plan.rows.part,
        num_warps=grouped.WARPS,
        maxnreg=grouped.MOST_REGISTERS,
    )
    if sinks is not None:
        out, lse = (x[0] for x in include_sinks(out[None], lse[None], sinks))
    return out, lse
