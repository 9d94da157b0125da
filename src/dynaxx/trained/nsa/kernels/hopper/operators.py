# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention on Hopper, in Gluon: `kernels.nsa.contract.NsaKernels`.

Gluon kernels score blocks, and attend to selected blocks for groups of 1, 2, 4, 8 and more q heads: by query if the
group fills a wgmma tile (`selected`), else by key (`selected_partial`). The rest is shared with the `triton` backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dynaxx.kernels.attention.hopper.config import selected_consumers
from dynaxx.kernels.primitives.hopper.descriptors import dense_rows
from dynaxx.lazy import lazy
from dynaxx.trained.nsa.kernels.gpu import compress as pooling
from dynaxx.trained.nsa.kernels.gpu import gate as gating
from dynaxx.trained.nsa.kernels.gpu import select
from dynaxx.trained.nsa.kernels.gpu import selected as shared
from dynaxx.trained.nsa.kernels.gpu.config import UNION_WIDTH, Schedule
from dynaxx.trained.nsa.kernels.gpu.query_unions import Unions, unions
from dynaxx.trained.nsa.kernels.gpu.selected import Mixture, selected_backward, selected_forward
from dynaxx.trained.nsa.kernels.hopper import fused
from dynaxx.trained.nsa.spans import NsaSpans

__all__ = [
    "fused",
    "gating",
    "pooling",
    "prepare_selected",
    "schedule_of",
    "select_blocks",
    "selected_backward",
    "selected_forward",
]

KEY_BLOCK = 64  # keys per block in the kernels by key
EITHER = 4  # group size that runs by query if neighbours select the same blocks, else by key
SMALL = (1, 2)  # group sizes that run by key


@dataclass(frozen=True)
class HopperSelectedPlan(shared.SelectedPlan):
    """A selection for a group size that the Gluon kernels support, prepared for forward and backward."""

    @property
    def consumers(self) -> int:
        """Consumers per program, 64 rows each."""
        return selected_consumers(self.group_size, self.spans.sizes.slc_block)

    @lazy
    def union(self) -> Unions:
        return unions(self.indices, self.spans, self.consumers * 64 // self.group_size)

    def forward_by_query(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, taken: Tensor | None, mixture: Mixture | None = None
    ) -> tuple[Tensor, Tensor]:
        from dynaxx.trained.nsa.kernels.hopper import selected

        q, k, v = (dense_rows(x[None])[0] for x in (q, k, v))
        return selected.forward(q, k, v, self.union, self.spans, self.consumers, scale, taken, mixture)

    @property
    def mixes(self) -> bool:
        return self.schedule == "union"

    @property
    def attends_window(self) -> bool:
        """Return whether the windows of neighbouring rows overlap: not if sequences have keys before their queries."""
        return self.mixes and (len(self.spans.ends_q) == 2 or self.spans.ends_q == self.spans.ends_k)

    def dq_by_query(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, others_dq: Tensor | None = None
    ) -> Tensor:
        from dynaxx.trained.nsa.kernels.hopper import selected_backward

        do, q, k, v = (dense_rows(x[None])[0] for x in (do, q, k, v))
        return selected_backward.backward_dq(
            do, q, k, v, rows, self.union, self.spans, self.consumers, scale, others_dq
        )  # fmt: skip

    def partials(self) -> Callable[..., None] | None:
        if self.spans.sizes.slc_block != KEY_BLOCK:
            return None
        from dynaxx.trained.nsa.kernels.hopper import selected_partial

        return selected_partial.partials

    def items_dkv(self) -> Callable[..., None] | None:
        if self.spans.sizes.slc_block != KEY_BLOCK:
            return None
        from dynaxx.trained.nsa.kernels.hopper import selected_dkv

        return selected_dkv.items_dkv


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NsaSpans, heads: int, scale: float) -> Tensor:
    """Return the selected blocks, like `kernels.nsa.reference.select_blocks`; Triton computes raw scores."""
    if lse is None or not k_cmp.shape[0]:
        return select.select_blocks(q, k_cmp, lse, spans, heads, scale)
    from dynaxx.trained.nsa.kernels.hopper.scores import TILE_ROWS, score_blocks

    return select.select_blocks(q, k_cmp, lse, spans, heads, scale, score_blocks, TILE_ROWS)


def schedule_of(group_size: int, kv_block: int) -> str:
    """Describe the order of processing in words, for `explain_selected`."""
    consumers = selected_consumers(group_size, kv_block)
    if not consumers:
        return shared.schedule_of(group_size, kv_block)
    positions = consumers * 64 // group_size
    if group_size == EITHER:
        return (
            f"forward by query, union of {positions} neighbouring positions by TMA, if they share most of their "
            "blocks, else by key (decided on the GPU); backward by key"
        )
    return f"by query: union of {positions} neighbouring positions by TMA, because groups of 8 and more fill tiles"


def prepare_selected(block_indices: Tensor, spans: NsaSpans, q: Tensor, k: Tensor, v: Tensor) -> shared.SelectedPlan:
    """Return a plan that forward and backward share."""
    plan = shared.prepare_selected(block_indices, spans, q, k, v)
    consumers = selected_consumers(plan.group_size, spans.sizes.slc_block)
    either = plan.group_size == EITHER
    schedule: Schedule = "either" if either else "union"
    if plan.group_size in SMALL or (either and consumers * 64 // EITHER * block_indices.shape[2] > UNION_WIDTH):
        schedule = "gather"
    elif not consumers:
        return plan
    return HopperSelectedPlan(plan.indices, plan.spans, plan.group_size, schedule, plan.tiles)
