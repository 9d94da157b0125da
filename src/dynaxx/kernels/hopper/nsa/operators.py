"""Native Sparse Attention on Hopper, in Gluon: the scores of blocks, and selected attention of groups of 1, 2, 4, 8 and
more, by query where they fill wgmma (`selected`), else by key (`selected_partial`); all else is Triton's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from dynaxx.kernels.hopper import support
from dynaxx.kernels.hopper.attention.config import selected_consumers
from dynaxx.kernels.hopper.primitives.descriptors import dense_rows
from dynaxx.kernels.problem import AttentionProblem
from dynaxx.kernels.triton.nsa import operators as portable
from dynaxx.kernels.triton.nsa.config import UNION_WIDTH, Schedule
from dynaxx.kernels.triton.nsa.operators import Mixture
from dynaxx.layout.nsa import NativeSpans

KEY_BLOCK = 64  # keys of the kernels by key
EITHER = 4  # the group that goes by query where neighbours agree, else by key
SMALL = (1, 2)  # groups that go by key
MOST_DIM = 128

_LATER = {"Branches": "rows", "branch_rows": "rows", "mixed_backward": "backward"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        return getattr(portable, name)
    return getattr(importlib.import_module(f"dynaxx.kernels.hopper.nsa.{_LATER[name]}"), name)


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot serve; a q block here is a position and its group."""
    reasons = support.unsupported_reasons(replace(problem, block_size=(64, problem.block_size[1])))
    if problem.head_dim > MOST_DIM:
        reasons.append(f"serves head_dim up to {MOST_DIM} for selected blocks, got {problem.head_dim}")
    return reasons


@dataclass(frozen=True)
class SelectedPlan(portable.SelectedPlan):
    """A selection of groups that Gluon takes, as both directions read it."""

    @property
    def consumers(self) -> int:
        """Of a program, 64 rows each."""
        return selected_consumers(self.group_size, self.spans.sizes.slc_block)

    @cached_property
    def union(self):
        from dynaxx.kernels.triton.nsa.query_unions import unions

        return unions(self.indices, self.spans, self.consumers * 64 // self.group_size)

    def forward_by_query(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, taken: Tensor | None, mixture: Mixture | None = None
    ) -> tuple[Tensor, Tensor]:
        from dynaxx.kernels.hopper.nsa import selected

        q, k, v = (dense_rows(x[None])[0] for x in (q, k, v))
        return selected.forward(q, k, v, self.union, self.spans, self.consumers, scale, taken, mixture)

    @property
    def mixes(self) -> bool:
        return self.schedule == "union"

    @property
    def attends_window(self) -> bool:
        """Where the windows of neighbouring rows overlap: not where sequences have keys before their queries."""
        return self.mixes and (len(self.spans.ends_q) == 2 or self.spans.ends_q == self.spans.ends_k)

    def dq_by_query(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, others_dq: Tensor | None = None
    ) -> Tensor:
        from dynaxx.kernels.hopper.nsa import selected_backward

        do, q, k, v = (dense_rows(x[None])[0] for x in (do, q, k, v))
        return selected_backward.backward_dq(
            do, q, k, v, rows, self.union, self.spans, self.consumers, scale, others_dq
        )  # fmt: skip

    def partials(self) -> Callable[..., None] | None:
        if self.spans.sizes.slc_block != KEY_BLOCK:
            return None
        from dynaxx.kernels.hopper.nsa import selected_partial

        return selected_partial.partials

    def items_dkv(self) -> Callable[..., None] | None:
        if self.spans.sizes.slc_block != KEY_BLOCK:
            return None
        from dynaxx.kernels.hopper.nsa import selected_dkv

        return selected_dkv.items_dkv


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, spans: NativeSpans, heads: int, scale: float) -> Tensor:
    """As `kernels.reference.native.select_blocks`; raw scores are Triton's."""
    if lse is None or not k_cmp.shape[0]:
        return portable.select_blocks(q, k_cmp, lse, spans, heads, scale)
    from dynaxx.kernels.hopper.nsa.scores import TILE_ROWS, score_blocks

    return portable.select_blocks(q, k_cmp, lse, spans, heads, scale, score_blocks, TILE_ROWS)


def schedule_of(group_size: int, kv_block: int) -> str:
    """In words, for `explain_selected`."""
    consumers = selected_consumers(group_size, kv_block)
    if not consumers:
        return portable.schedule_of(group_size, kv_block)
    positions = consumers * 64 // group_size
    if group_size == EITHER:
        return (
            f"forward by query, the union of {positions} neighbouring positions by TMA, where they agree on most of "
            "their blocks, else by key (the GPU decides); backward by key"
        )
    return f"by query: the union of {positions} neighbouring positions by TMA, since groups of 8 and more fill tiles"


def prepare_selected(indices: Tensor, spans: NativeSpans, q: Tensor, k: Tensor, v: Tensor) -> portable.SelectedPlan:
    """What forward and backward share."""
    plan = portable.prepare_selected(indices, spans, q, k, v)
    consumers = selected_consumers(plan.group_size, spans.sizes.slc_block)
    either = plan.group_size == EITHER
    schedule: Schedule = "either" if either else "union"
    if plan.group_size in SMALL or (either and consumers * 64 // EITHER * indices.shape[2] > UNION_WIDTH):
        schedule = "gather"
    elif not consumers:
        return plan
    return SelectedPlan(plan.indices, plan.spans, plan.group_size, schedule, plan.tiles)
