"""Native Sparse Attention on Hopper: selected attention of groups that fill wgmma goes by query in Gluon (`selected`);
all else is Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from dynaxx.kernels.hopper import support
from dynaxx.kernels.hopper.config import selected_consumers
from dynaxx.kernels.hopper.launch import dense_rows
from dynaxx.kernels.problem import AttentionProblem
from dynaxx.kernels.triton import native as portable
from dynaxx.kernels.triton.launch import positive_scale
from dynaxx.layout.native import NativeSpans


def __getattr__(name: str) -> Any:
    return getattr(portable, name)


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot serve; a q block here is a position and its group."""
    return support.unsupported_reasons(replace(problem, block_size=(64, problem.block_size[1])))


@dataclass(frozen=True)
class SelectedPlan:
    """A selection as both directions read it."""

    portable: portable.SelectedPlan
    consumers: int  # of a program, 64 rows each; 0 where Triton serves

    @cached_property
    def union(self):  # type: ignore[no-untyped-def]
        from dynaxx.kernels.triton.native_index import unions

        return unions(self.portable.indices, self.portable.spans, self.consumers * 64 // self.portable.group_size)


def schedule_of(group_size: int, kv_block: int) -> str:
    """In words, for `explain_selected`."""
    consumers = selected_consumers(group_size, kv_block)
    if not consumers:
        return portable.schedule_of(group_size, kv_block)
    positions = consumers * 64 // group_size
    return f"by query: the union of {positions} neighbouring positions, by TMA and wgmma, since groups of 8 fill a tile"


def prepare_selected(indices: Tensor, spans: NativeSpans, q: Tensor, k: Tensor, v: Tensor) -> SelectedPlan:
    """What forward and backward share."""
    plan = portable.prepare_selected(indices, spans, q, k, v)
    consumers = selected_consumers(plan.group_size, spans.sizes.slc_block)
    return SelectedPlan(replace(plan, schedule="union") if consumers else plan, consumers)


def selected_forward(q: Tensor, k: Tensor, v: Tensor, plan: SelectedPlan, scale: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.native.selected_forward`."""
    slots = plan.portable.indices.shape[2]
    if not (plan.consumers and q.shape[0] and k.shape[0] and slots):
        return portable.selected_forward(q, k, v, plan.portable, scale)
    from dynaxx.kernels.hopper import selected

    q, scale = positive_scale(q, scale)
    q, k, v = (dense_rows(x[None])[0] for x in (q, k, v))
    return selected.forward(q, k, v, plan.union, plan.portable.spans, plan.consumers, scale)


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
    """As `kernels.triton.native.selected_backward`."""
    by_query = _dq(plan, scale) if plan.consumers else None
    return portable.selected_backward(do, dlse, q, k, v, out, lse, plan.portable, scale, by_query)


def _dq(plan: SelectedPlan, scale: float) -> Callable[..., Tensor]:
    from dynaxx.kernels.hopper import selected_backward

    def run(do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        do, q, k, v = (dense_rows(x[None])[0] for x in (do, q, k, v))
        return selected_backward.backward_dq(do, q, k, v, rows, plan.union, plan.portable.spans, plan.consumers, scale)

    return run
