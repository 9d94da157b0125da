# SPDX-License-Identifier: Apache-2.0
"""Selected attention on GPUs, by one of two schedules. Both GPU backends share it.

The schedule by query ("union") reads each block of keys once for a few neighbouring query positions. The schedule by
key ("gather") reads each query once per block that it selected and merges partial results, for a bounded number of
queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.gpu.nsa import config
from dynaxx.kernels.gpu.runtime.arguments import positive_scale, unit_stride
from dynaxx.layout.nsa import NativeSpans
from dynaxx.lazy import lazy

if TYPE_CHECKING:
    from dynaxx.kernels.gpu.nsa.key_items import Items

PARTIAL_BYTES = 1 << 30  # of partial outputs held at once
PARTIAL_GRAD_BYTES = 256 << 20  # of partial dq: backward holds more besides


class Mixture(NamedTuple):
    """What the selected branch is added to, each branch times its gate."""

    cmp: Tensor  # (T, Hq, E), the compressed branch
    swa: Tensor  # (T, Hq, E), the window branch, or where to write it if `swa_lse` is given
    gates: Tensor  # (T, Hq, 3), of the compressed, the selected and the window branch
    out: Tensor  # (T, Hq, E), where the sum goes
    alone: bool  # whether to return the selected branch by itself, too; else that result is undefined
    swa_lse: Tensor | None  # (Hq, T) fp32, where to write the window branch's lse; None: the branch is given


@dataclass(frozen=True)
class SelectedPlan:
    """A selection, prepared for forward and backward."""

    indices: Tensor  # (T, Hs, n) int32 contiguous
    spans: NativeSpans
    group_size: int
    schedule: config.Schedule
    tiles: config.QueryTiles

    @lazy
    def union(self):
        from dynaxx.kernels.gpu.nsa.query_unions import unions

        return unions(self.indices, self.spans, self.tiles.positions)

    def forward_by_query(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, taken: Tensor | None, mixture: Mixture | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse; scale > 0. Unspecified where `choose` returned `taken` and it is 0."""
        assert mixture is None, "this plan mixes nothing"
        from dynaxx.kernels.gpu.nsa import union

        return union.forward(q, k, v, self.union, self.spans, self.tiles, scale)

    @property
    def mixes(self) -> bool:
        """Whether `forward_by_query` can add the other branches to the selected one."""
        return False

    @property
    def attends_window(self) -> bool:
        """Whether `forward_by_query` computes the window branch, too, when it mixes."""
        return False

    def choose(self) -> Tensor | None:
        """Return (1,) int32 on the device: whether neighbours agree so much that by query is faster; None if known.

        Where they do not, the unions are emptied, so that the kernels by query have nothing to do.
        """
        if self.schedule != "either":
            return None
        from dynaxx.kernels.gpu.nsa.query_unions import choose

        return choose(self.union, int(config.AGREE * self.indices.numel()))

    def dq_by_query(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, others_dq: Tensor | None = None
    ) -> Tensor:
        """Return dq, added to `others_dq` if given; `rows` as `nsa.rows.row_pairs` returns them."""
        from dynaxx.kernels.gpu.nsa import union

        dq = union.backward_dq(do, q, k, v, rows, self.union, self.spans, self.tiles, scale)
        return dq if others_dq is None else others_dq.add_(dq)

    def partials(self) -> Callable[..., None] | None:
        """Return a kernel that replaces the one for partial results by key, or None."""
        return None

    def items_dkv(self) -> Callable[..., None] | None:
        """Return a kernel that replaces the one for dk and dv where queries are not cut into chunks, or None."""
        return None

    def by_heads(self, kv_heads: int, row_bytes: int, limit: int) -> list[tuple[slice, slice, SelectedPlan]]:
        """Return kv heads, their q heads, and this plan for them alone, in parts of `limit` bytes of partial results.

        A part has one kv head or more; `items` cuts the queries of a larger one.
        """
        queries, heads, slots = self.indices.shape
        per_kv = heads // kv_heads
        step = -(-kv_heads // -(-queries * heads * slots * self.group_size * row_bytes // limit))
        found = []
        for first in range(0, kv_heads, step):
            stop = min(first + step, kv_heads)
            own = self.indices[:, first * per_kv : stop * per_kv].contiguous()
            q_heads = slice(first * per_kv * self.group_size, stop * per_kv * self.group_size)
            found.append((slice(first, stop), q_heads, replace(self, indices=own)))
        return found

    def items(self, row_bytes: int | None, limit: int = 0) -> tuple[Items, range]:
        """Return entries by block, and their chunks: `limit` bytes of partials, `row_bytes` per slot and head."""
        from dynaxx.kernels.gpu.nsa.key_items import items

        queries, heads, slots = self.indices.shape
        step = queries
        if row_bytes is not None:
            step = min(queries, max(1, limit // (heads * slots * self.group_size * row_bytes)))
        length = config.item_length(self.group_size, row_bytes is not None)
        return items(self.indices, self.spans, step, length), range(-(-queries // step))


def schedule_of(group_size: int, kv_block: int) -> str:
    """Return in words how blocks are visited, for `explain_selected`."""
    if config.choose_schedule(group_size) == "gather":
        return "by key: gathers the queries of each block, merges partial results, since so small a group fills no tile"
    return "by query: the union of a few neighbouring positions, since groups of 16 fill a matrix instruction"


def prepare_selected(block_indices: Tensor, spans: NativeSpans, q: Tensor, k: Tensor, v: Tensor) -> SelectedPlan:
    """Return what forward and backward share."""
    group_size = q.shape[1] // block_indices.shape[1]
    tiles = config.query_tiles(group_size, block_indices.shape[2], q.shape[2], v.shape[2], q.dtype)
    return SelectedPlan(block_indices, spans, group_size, config.choose_schedule(group_size), tiles)


def selected_and_mixed(
    q: Tensor, k: Tensor, v: Tensor, plan: SelectedPlan, scale: float, mixture: Mixture
) -> tuple[Tensor, Tensor]:
    """Attend as `selected_forward`, for a plan that mixes; write the gated sum of all branches to `mixture.out`."""
    q, scale = positive_scale(q, scale)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    return plan.forward_by_query(q, k, v, scale, None, mixture)


def selected_forward(q: Tensor, k: Tensor, v: Tensor, plan: SelectedPlan, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse, as `kernels.reference.nsa.selected_forward`; fp32 inputs are multiplied in full fp32."""
    from dynaxx.kernels.gpu.nsa import gather

    q, scale = positive_scale(q, scale)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    slots = plan.indices.shape[2]
    if not (q.shape[0] and k.shape[0] and slots):
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full((q.shape[1], q.shape[0]), -torch.inf).float()
    if plan.schedule == "union":
        return plan.forward_by_query(q, k, v, scale, None)
    taken = plan.choose()
    if taken is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    else:  # what follows writes over it, or does nothing
        out, lse = plan.forward_by_query(q, k, v, scale, taken)
    key_tiles = config.forward_key_tiles(plan.group_size, q.shape[2], v.shape[2], q.dtype)
    row_bytes = v.shape[2] * q.dtype.itemsize
    for kv, own, part in plan.by_heads(k.shape[1], row_bytes, PARTIAL_BYTES):
        index, chunks = part.items(row_bytes, PARTIAL_BYTES)
        for chunk in chunks:
            gather.forward_chunk(
                q[:, own], k[:, kv], v[:, kv], out[:, own], lse[own], index, chunk, slots, part.indices.shape[1],
                plan.spans, key_tiles, scale, taken, plan.partials(),
            )  # fmt: skip
    return out, lse


def selected_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: SelectedPlan,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v; deterministic."""
    from dynaxx.kernels.gpu.nsa.rows import row_pairs

    if not (q.shape[0] and k.shape[0] and plan.indices.shape[2]):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    rows = row_pairs(unit_stride(do), dlse, out, lse)
    return selected_backward_of_rows(do, q, k, v, rows, plan, scale)


def selected_backward_of_rows(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, plan: SelectedPlan, scale: float,
    others_dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return as `selected_backward`, from rows of `nsa.rows.row_pairs`; dq is added to `others_dq`, contiguous."""
    from dynaxx.kernels.gpu.nsa import backward

    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    tiles = config.backward_key_tiles(plan.group_size, q.shape[2], v.shape[2], q.dtype)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    if plan.schedule == "union":
        index, _ = plan.items(None)
        dq = plan.dq_by_query(do, q, k, v, rows, scale, others_dq)
        backward.backward_chunk(
            do, q, k, v, rows, (None, dk, dv), index, 0, plan.indices, plan.spans, tiles, scale, plan.items_dkv()
        )
        return dq, dk, dv
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    row_bytes = q.shape[2] * q.dtype.itemsize
    for kv, own, part in plan.by_heads(k.shape[1], row_bytes, PARTIAL_GRAD_BYTES):
        inputs = do[:, own], q[:, own], k[:, kv], v[:, kv], rows[:, own].contiguous()
        index, chunks = part.items(row_bytes, PARTIAL_GRAD_BYTES)
        sums = dk[:, kv], dv[:, kv]
        if len(chunks) > 1:  # chunks add up in fp32
            sums = dk.new_empty(sums[0].shape, dtype=torch.float32), dv.new_empty(sums[1].shape, dtype=torch.float32)
        for chunk in chunks:
            backward.backward_chunk(*inputs, (dq[:, own], *sums), index, chunk, part.indices, plan.spans, tiles, scale)
        if len(chunks) > 1:
            dk[:, kv], dv[:, kv] = sums
    return dq if others_dq is None else others_dq.add_(dq), dk, dv
