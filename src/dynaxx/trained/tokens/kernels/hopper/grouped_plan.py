# SPDX-License-Identifier: Apache-2.0
"""Grouped-query heads over chosen tokens on Hopper: what `grouped.py` serves, and launches of both kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.kernels.sinks import include_sinks
from dynaxx.kernels.support.hopper import DTYPES
from dynaxx.trained.support.hopper import GROUPED, GROUPED_DIM
from dynaxx.trained.tokens.kernels.gpu import plan as portable_plan
from dynaxx.trained.tokens.kernels.gpu.config import MAX_MARKS, TileRows
from dynaxx.trained.tokens.kernels.gpu.gradients import GradientRows, Portion
from dynaxx.trained.tokens.kernels.gpu.plan import TokenPlan
from dynaxx.trained.tokens.kernels.gpu.primitives import ListTables
from dynaxx.trained.tokens.kernels.hopper import grouped, grouped_lists, grouped_rows
from dynaxx.trained.tokens.kernels.hopper.grouped import _token_grouped_kernel
from dynaxx.trained.tokens.kernels.hopper.grouped_lists import _token_grouped_lists_kernel
from dynaxx.trained.tokens.kernels.hopper.grouped_order import ordered
from dynaxx.trained.tokens.kernels.hopper.grouped_rows import _token_grouped_rows_kernel
from dynaxx.trained.tokens.spans import TokenSpans

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class GroupedPlan(TokenPlan):
    """A plan of tiles of 128 rows, and the selection, from which the portable kernels make a plan of their own."""

    chosen: Tensor
    spans: TokenSpans
    apart: Tensor  # (tiles, Hs) int32, see `grouped_order.py`

    def portable(self, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
        """Return the plan of the portable kernels."""
        return portable_plan.prepare(self.chosen, self.spans, q, k, v)


def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
    """Return a `GroupedPlan` where `grouped.py` serves, else the plan of the portable kernels."""
    part = q.shape[1] // max(block_indices.shape[1], k.shape[1])
    if not (_fits(q, k, v) and part in GROUPED and spans.block_size == 1):
        return portable_plan.prepare(block_indices, spans, q, k, v)
    rows = TileRows(min(2 * grouped.ROWS.value // part, MAX_MARKS), part, 1)
    plan = portable_plan.prepare_rows(block_indices, spans, q, k, rows, _lists)
    assert plan.counts is not None, "tiles of several queries"
    lists, marks, apart = ordered(plan.lists, plan.marks, plan.counts, part)
    rooms = portable_plan.list_rooms(spans, rows.per_tile, block_indices.shape[2], q.device)
    fields = vars(plan) | {"lists": lists, "marks": marks, "rooms": rooms}
    return GroupedPlan(**fields, chosen=block_indices, spans=spans, apart=apart)


def _lists(
    chosen: Tensor, spans: TokenSpans, per_tile: int, tiles: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lists, marks of 32 bits, and counts."""
    lists, marks, counts = portable_plan.empty_lists(chosen, spans, per_tile, tiles, 32)
    if counts.numel():
        _token_grouped_lists_kernel[(counts.numel(),)](
            chosen,
            tiles,
            position,
            lists,
            marks,
            counts,
            heads=chosen.shape[1],
            slots=chosen.shape[2],
            capacity=lists.shape[2],
            num_warps=grouped_lists.WARPS,
        )
    return lists, marks, counts


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether dtypes, widths and addresses allow copies of 16 bytes."""
    served = q.dtype in DTYPES and q.shape[2] == v.shape[2] == GROUPED_DIM and k.dtype == v.dtype == q.dtype
    wide = all(x.stride(2) == 1 and not (x.stride(0) | x.stride(1)) % 8 and not x.data_ptr() % 16 for x in (k, v))
    return served and wide


def forward(
    q: Tensor, k: Tensor, v: Tensor, plan: GroupedPlan, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T) in fp32, as `kernels.tokens.reference.attention`."""
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
        plan.apart,
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
        maxnreg=grouped.MAX_REGISTERS,
    )
    if sinks is not None:
        out, lse = (x[0] for x in include_sinks(out[None], lse[None], sinks))
    return out, lse


def narrow_rows(portion: Portion) -> GradientRows:
    """Do what `gpu.tokens.gradients.narrow_rows` does, for a `GroupedPlan`."""
    q, k, v, dq, plan, _, tiles, *_ = portion
    assert isinstance(plan, GroupedPlan), "`prepare` makes them"
    assert plan.rooms is not None, "so are these"
    assert portion.begin is not None, "as there are rooms"
    rows_of_head = portion.own * (plan.rooms.before[tiles.stop] - plan.rooms.before[tiles.start])
    rows = q.new_empty(len(portion.heads) * rows_of_head, q.shape[2] + v.shape[2])
    only = ("p_do", "p_lse", "p_delta", "lists", "queries", "units", "select_heads", "kv_heads", "slots", "group_size",
            "scale", "q_strides", "k_strides", "v_strides", "do_strides", "D", "PART")  # fmt: skip
    _token_grouped_rows_kernel[(len(tiles), portion.units)](
        q,
        k,
        v,
        p_dq=dq,
        p_rows=rows,
        p_apart=plan.apart,
        p_begin=portion.begin,
        rows=rows_of_head,
        own_units=portion.own,
        dq_strides=packed_strides_of(dq),
        num_warps=grouped_rows.WARPS,
        maxnreg=grouped_rows.MAX_REGISTERS,
        **portion.first,
        **{name: portion.arguments[name] for name in only},
    )
    return GradientRows(rows, by_thread=True)
