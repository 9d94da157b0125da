"""What the core needs of a layout beside its own tensors; made once per layout and kept as long as it lives."""

from __future__ import annotations

from ctypes import CDLL, addressof, pointer
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dynaxx.kernels.cpu.arguments import WorkPlan
from dynaxx.layout import BlockLayout
from dynaxx.layout.host import on_host

PANEL = 16  # queries per panel, as in core/source/vec.h
MAX_RUNS = 8  # as in core/source/plan.h


class LayoutPlan:
    """The prepared layout: a `WorkPlan` and the tensors that it points into."""

    def __init__(self, layout: BlockLayout, library: CDLL, rows_are_keys: bool) -> None:
        if rows_are_keys:
            by_key = layout.transposed
            chosen = (by_key.q_indptr, by_key.q_indices, by_key.q_masks)
        else:
            chosen = (layout.kv_indptr, layout.kv_indices, layout.kv_masks)
        indptr, indices, masks = (x.contiguous() for x in chosen)
        words, runs = mask_tables(layout, library, rows_are_keys)
        self.tensors = [indptr, indices, masks, row_order(indptr, library), words, runs]
        if rows_are_keys:
            self.tensors.append(visit_ranks(indptr, indices, layout.q_blocks, library))
        sides = [(layout.seqlen_q, layout.block_size[0]), (layout.seqlen_k, layout.block_size[1])]
        rows, visited = reversed(sides) if rows_are_keys else sides
        pointers = (x.data_ptr() for x in self.tensors)
        self.struct = WorkPlan(*rows, *visited, layout.layout_batch, layout.layout_heads, *pointers)
        self.pointer = pointer(self.struct)
        self.address = addressof(self.struct)


_plans: tuple[WeakKeyDictionary[BlockLayout, LayoutPlan], ...] = (WeakKeyDictionary(), WeakKeyDictionary())


@on_host
def plan_of(layout: BlockLayout, library: CDLL, *, rows_are_keys: bool = False) -> LayoutPlan:
    """The plan of a layout, from the cache after the first time. Every build of the core reads the same plan.

    Args:
        rows_are_keys: rows of kv blocks that visit q blocks, for backward; else the layout's own rows.
    """
    plans = _plans[rows_are_keys]
    plan = plans.get(layout)
    if plan is None:  # where two threads get here at once, the first plan stays: its memory is already in use
        plan = plans.setdefault(layout, LayoutPlan(layout, library, rows_are_keys))
    return plan


def row_order(indptr: Tensor, library: CDLL) -> Tensor:
    """Rows of each head of a (batch, heads, rows + 1) CSR, the ones with most blocks first, (batch, heads, rows)."""
    batch, heads, ends = indptr.shape
    order = torch.empty(batch, heads, ends - 1, dtype=torch.int32)
    library.dynaxx_cpu_plan_rows(indptr.data_ptr(), batch * heads, ends - 1, order.data_ptr())
    return order


def visit_ranks(indptr: Tensor, indices: Tensor, visited_blocks: int, library: CDLL) -> Tensor:
    """Of each entry of a (batch, heads, rows + 1) CSR, how many rows before its own visit the same block, (nnz,)."""
    batch, heads, ends = indptr.shape
    counts, ranks = torch.empty(visited_blocks, dtype=torch.int32), torch.empty_like(indices)
    library.dynaxx_cpu_plan_ranks(
        indptr.data_ptr(),
        indices.data_ptr(),
        batch * heads,
        ends - 1,
        visited_blocks,
        counts.data_ptr(),
        ranks.data_ptr(),
    )
    return ranks


def mask_tables(layout: BlockLayout, library: CDLL, rows_are_keys: bool = False) -> tuple[Tensor, Tensor]:
    """The element masks by panels of the rows' side: who sees each visited token, and the runs that anyone sees.

    Returns:
        words (num_masks, block / PANEL, visited_block) int16, bit i is token i of the panel; runs (num_masks,
        block / PANEL, MAX_RUNS, 2) uint8, begin and end, empty behind the last.
    """
    q_block, kv_block = layout.block_size
    block, visited_block = (kv_block, q_block) if rows_are_keys else (q_block, kv_block)
    bits = layout.masks.bits.contiguous()
    shape = (len(layout.masks), block // PANEL)
    words = torch.empty(*shape, visited_block, dtype=torch.int16)
    runs = torch.empty(*shape, MAX_RUNS, 2, dtype=torch.uint8)
    library.dynaxx_cpu_plan_masks(
        bits.data_ptr(), shape[0], q_block, kv_block, rows_are_keys, words.data_ptr(), runs.data_ptr()
    )
    return words, runs
