"""What the core needs of a layout beside its own tensors; made once per layout and kept as long as it lives."""

from __future__ import annotations

from ctypes import CDLL, pointer
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dynaxx.kernels.cpu.arguments import Plan
from dynaxx.layout import BlockLayout

PANEL = 16  # queries per panel, as in core/vec.h
MAX_RUNS = 8  # as in core/plan.h


class LayoutPlan:
    """The prepared layout: a `Plan` and the tensors that it points into."""

    def __init__(self, layout: BlockLayout, library: CDLL) -> None:
        self.tensors = {
            "kv_indptr": layout.kv_indptr.contiguous(),
            "kv_indices": layout.kv_indices.contiguous(),
            "kv_masks": layout.kv_masks.contiguous(),
            "row_order": row_order(layout.kv_indptr.contiguous(), library),
        }
        self.tensors["mask_words"], self.tensors["mask_runs"] = mask_tables(layout, library)
        self.struct = Plan(
            layout.seqlen_q,
            layout.seqlen_k,
            *layout.block_size,
            layout.layout_batch,
            layout.layout_heads,
            **{name: tensor.data_ptr() for name, tensor in self.tensors.items()},
        )
        self.pointer = pointer(self.struct)


_plans: WeakKeyDictionary[BlockLayout, LayoutPlan] = WeakKeyDictionary()


def plan_of(layout: BlockLayout, library: CDLL) -> LayoutPlan:
    """The plan of a layout, from the cache after the first time. Every build of the core reads the same plan."""
    plan = _plans.get(layout)
    if plan is None:
        plan = _plans[layout] = LayoutPlan(layout, library)
    return plan


def row_order(indptr: Tensor, library: CDLL) -> Tensor:
    """Rows of each head of a (batch, heads, rows + 1) CSR, the ones with most blocks first, (batch, heads, rows)."""
    batch, heads, ends = indptr.shape
    order = torch.empty(batch, heads, ends - 1, dtype=torch.int32)
    library.dynaxx_cpu_plan_rows(indptr.data_ptr(), batch * heads, ends - 1, order.data_ptr())
    return order


def mask_tables(layout: BlockLayout, library: CDLL) -> tuple[Tensor, Tensor]:
    """The element masks by panels of queries: who sees each key, and the runs of keys that anyone sees.

    Returns:
        words (num_masks, q_block / PANEL, kv_block) int16, bit i is query i of the panel; runs (num_masks,
        q_block / PANEL, MAX_RUNS, 2) uint8, begin and end, empty behind the last.
    """
    q_block, kv_block = layout.block_size
    bits = layout.masks.bits.contiguous()
    shape = (len(layout.masks), q_block // PANEL)
    words = torch.empty(*shape, kv_block, dtype=torch.int16)
    runs = torch.empty(*shape, MAX_RUNS, 2, dtype=torch.uint8)
    library.dynaxx_cpu_plan_masks(bits.data_ptr(), shape[0], q_block, kv_block, words.data_ptr(), runs.data_ptr())
    return words, runs
