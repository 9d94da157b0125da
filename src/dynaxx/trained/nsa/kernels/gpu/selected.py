# SPDX-License-Identifier: Apache-2.0
"""Selected attention on GPUs, with one of two schedules. Both GPU backends share this module.

The schedule by query ("union") reads each block of keys once for a few neighbouring query positions. The schedule by
key ("gather") reads each query once per block that it selected, and merges partial results. It processes a bounded
number of queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import SavedForward
from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.runtime.arguments import positive_scale, unit_stride
from dynaxx.lazy import lazy
from dynaxx.trained.nsa.kernels.gpu import config
from dynaxx.trained.nsa.spans import NsaSpans

if TYPE_CHECKING:
    from dynaxx.trained.nsa.kernels.gpu.key_items import Items

PARTIAL_BYTES = 1 << 30  # upper bound for partial outputs in memory
PARTIAL_GRAD_BYTES = 256 << 20  # upper bound for partial dq; smaller, because backward needs other memory as well


class Mixture(NamedTuple):
    """The other branches, to which a kernel adds the selected branch; each branch is weighted by its gate."""

    cmp: Tensor  # (T, Hq, E), compressed branch
    swa: Tensor  # (T, Hq, E), window branch; if `swa_lse` is given, the kernel computes and writes it
    gates: Tensor  # (T, Hq, 3), for the compressed, selected and window branch
    out: Tensor  # (T, Hq, E), receives the sum
    alone: bool  # also return the selected branch; if False, that result is undefined
    swa_lse: Tensor | None  # (Hq, T) fp32, receives the lse of the window branch; None: `swa` is given


@dataclass(frozen=True)
class SelectedPlan:
    """A selection prepared for forward and backward."""

    indices: Tensor  # (T, Hs, n) int32 contiguous
    spans: NsaSpans
    group_size: int
    schedule: config.Schedule
    tiles: config.QueryTiles

    @lazy
    def union(self):
        """Return the union of blocks of each tile of queries."""
        from dynaxx.trained.nsa.kernels.gpu.query_unions import unions

        return unions(self.indices, self.spans, self.tiles.positions)

    def forward_by_query(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, taken: Tensor | None, mixture: Mixture | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse; scale > 0. The results are undefined if `choose` returned a `taken` of 0."""
        assert mixture is None, "this plan does not mix branches"
        from dynaxx.trained.nsa.kernels.gpu import union

        return union.forward(q, k, v, self.union, self.spans, self.tiles, scale)

    @property
    def mixes(self) -> bool:
        """Return whether `forward_by_query` can add the other branches to the selected one."""
        return False

    @property
    def attends_window(self) -> bool:
        """Return whether `forward_by_query` also computes the window branch if it mixes branches."""
        return False

    def choose(self) -> Tensor | None:
        """Return (1,) int32 on the device: 1 if neighbours share so many blocks that by query is faster, else 0.

        If the result is 0, the unions are emptied, so that the kernels by query have nothing to do. Return None if the
        schedule is fixed.
        """
        if self.schedule != "either":
            return None
        from dynaxx.trained.nsa.kernels.gpu.query_unions import choose

        return choose(self.union, int(config.AGREE * self.indices.numel()))

    def dq_by_query(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, others_dq: Tensor | None = None
    ) -> Tensor:
        """Return dq, added to `others_dq` if given; `rows` come from `nsa.rows.row_pairs`."""
        from dynaxx.trained.nsa.kernels.gpu import union

        dq = union.backward_dq(do, q, k, v, rows, self.union, self.spans, self.tiles, scale)
        return dq if others_dq is None else others_dq.add_(dq)

    def partials(self) -> Callable[..., None] | None:
        """Return a kernel that replaces the default one for partial results by key, or None."""
        return None

    def items_dkv(self) -> Callable[..., None] | None:
        """Return a kernel that replaces the default one for dk and dv if there is a single chunk, or None."""
        return None

    def by_heads(self, kv_heads: int, row_bytes: int, limit: int) -> list[tuple[slice, slice, SelectedPlan]]:
        """Split the plan by kv heads into parts (kv heads, q heads, plan) with `limit` bytes of partial results each.

        A part has at least one kv head; if that still exceeds the limit, `items` splits its queries.
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
        """Return the entries by block, and the chunks of queries, with at most `limit` bytes of partial results each.

        `row_bytes` is the size of a partial result per slot and q head; None: a single chunk.
        """
        from dynaxx.trained.nsa.kernels.gpu.key_items import items

        queries, heads, slots = self.indices.shape
        step = queries
        if row_bytes is not None:
            step = min(queries, max(1, limit // (heads * slots * self.group_size * row_bytes)))
        length = config.item_length(self.group_size, row_bytes is not None)
        return items(self.indices, self.spans, step, length), range(-(-queries // step))


def schedule_of(group_size: int, kv_block: int) -> str:
    """Describe the order of processing in words, for `explain_selected`."""
    if config.choose_schedule(group_size) == "gather":
        return "by key: gathers the queries of each block and merges partial results, as small groups fill no tile"
    return "by query: visits the union of a few neighbouring positions, as groups of 16 fill a matrix instruction"


def prepare_selected(block_indices: Tensor, spans: NsaSpans, q: Tensor, k: Tensor, v: Tensor) -> SelectedPlan:
    """Return a plan that forward and backward share."""
    group_size = q.shape[1] // block_indices.shape[1]
    tiles = config.query_tiles(group_size, block_indices.shape[2], q.shape[2], v.shape[2], q.dtype, gpu_of(q.device))
    return SelectedPlan(block_indices, spans, group_size, config.choose_schedule(group_size), tiles)


def selected_and_mixed(
    q: Tensor, k: Tensor, v: Tensor, plan: SelectedPlan, scale: float, mixture: Mixture
) -> tuple[Tensor, Tensor]:
    """Attend like `selected_forward`, for a plan that mixes; write the gated sum of all branches to `mixture.out`."""
    q, scale = positive_scale(q, scale)
    q, k, v = (unit_stride(x) for x in (q, k, v))
    return plan.forward_by_query(q, k, v, scale, None, mixture)


def selected_forward(q: Tensor, k: Tensor, v: Tensor, plan: SelectedPlan, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse like `kernels.nsa.reference.selected_forward`; products of fp32 inputs are in full fp32."""
    from dynaxx.trained.nsa.kernels.gpu import gather

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
    else:  # the kernels by key overwrite these results, or do nothing
        out, lse = plan.forward_by_query(q, k, v, scale, taken)
    key_tiles = config.forward_key_tiles(plan.group_size, q.dtype)
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
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: SelectedPlan, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v. Deterministic."""
    from dynaxx.trained.nsa.kernels.gpu.rows import row_pairs

    q, k, v, out, lse = saved
    if not (q.shape[0] and k.shape[0] and plan.indices.shape[2]):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    rows = row_pairs(unit_stride(do), dlse, out, lse)
    return selected_backward_of_rows(do, q, k, v, rows, plan, scale)


def selected_backward_of_rows(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, plan: SelectedPlan, scale: float,
    others_dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `selected_backward` from the rows of `nsa.rows.row_pairs`; dq is added to contiguous `others_dq`."""
    from dynaxx.trained.nsa.kernels.gpu import backward

    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    tiles = config.backward_key_tiles(plan.group_size, q.shape[2], v.shape[2], q.dtype, gpu_of(q.device))
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
        if len(chunks) > 1:  # sum the chunks in fp32
            sums = dk.new_empty(sums[0].shape, dtype=torch.float32), dv.new_empty(sums[1].shape, dtype=torch.float32)
        for chunk in chunks:
            backward.backward_chunk(*inputs, (dq[:, own], *sums), index, chunk, part.indices, plan.spans, tiles, scale)
        if len(chunks) > 1:
            dk[:, kv], dv[:, kv] = sums
    return dq if others_dq is None else others_dq.add_(dq), dk, dv
