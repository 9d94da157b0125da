# SPDX-License-Identifier: Apache-2.0
"""`LayoutPlan`: a layout prepared for the core, with checked private copies, row orders, mask tables and ranks.

A plan is built once per layout and cached with it. The core never reads a tensor that other code can write to. Changing
a layout while the core runs therefore gives wrong numbers at worst.
"""

from __future__ import annotations

from ctypes import CDLL, pointer

import torch
from torch import Tensor

from dynaxx.core.structures import BAD_INPUT, raise_for_status
from dynaxx.kernels.runtime.core_arguments import PANEL, WorkPlan
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import PerLayout
from dynaxx.layout.host import address, never_traced, on_host

MAX_RUNS = 8  # equal to that in core/source/plan.h


class LayoutPlan:
    """A prepared layout: a `WorkPlan` and the tensors that its pointers refer to.

    Raises:
        ValueError: an index or offset of the layout is out of range.
    """

    @never_traced
    def __init__(self, layout: BlockLayout, library: CDLL, rows_are_keys: bool) -> None:
        if rows_are_keys:
            by_key = layout.transposed
            chosen = (by_key.q_indptr, by_key.q_num_partial, by_key.q_indices, by_key.q_masks)
        else:
            chosen = (layout.kv_indptr, layout.kv_num_partial, layout.kv_indices, layout.kv_masks)
        indptr, num_partial, indices, masks = (x.clone(memory_format=torch.contiguous_format) for x in chosen)
        visited = layout.q_blocks if rows_are_keys else layout.kv_blocks
        check_plan(indptr, num_partial, indices, masks, visited, len(layout.masks), library)
        words, runs = mask_tables(layout, library, rows_are_keys)
        self.tensors = [indptr, indices, masks, row_order(indptr, library), words, runs]
        if rows_are_keys:
            self.tensors.append(visit_ranks(indptr, indices, visited, library))
        sides = [(layout.seqlen_q, layout.block_size[0]), (layout.seqlen_k, layout.block_size[1])]
        rows, visited_side = reversed(sides) if rows_are_keys else sides
        pointers = (address(x, x.dtype, x.shape) for x in self.tensors)
        self.struct = WorkPlan(*rows, *visited_side, layout.layout_batch, layout.layout_heads, *pointers)
        self.pointer = pointer(self.struct)


_plans = PerLayout()


@on_host
def plan_of(layout: BlockLayout, library: CDLL, *, rows_are_keys: bool = False) -> LayoutPlan:
    """Return the plan of a layout, cached after the first call. All builds of the core use the same plan.

    Args:
        layout: the layout.
        library: the core.
        rows_are_keys: make rows of kv blocks that visit q blocks, for the backward pass; else use the layout's rows.

    Raises:
        ValueError: an index or offset of the layout is out of range.
    """
    plans = _plans.of(layout)
    plan = plans.get(rows_are_keys)
    if plan is None:  # if two threads build a plan at once, the first one is kept
        plan = plans.setdefault(rows_are_keys, LayoutPlan(layout, library, rows_are_keys))
    return plan


@never_traced
def check_plan(
    indptr: Tensor, num_partial: Tensor, indices: Tensor, masks: Tensor, visited: int, num_masks: int, library: CDLL
) -> None:
    """Check the numbers of a CSR that the core is about to read; raise ValueError if one is out of range.

    `sparse_attention` has checked the layout already; this check finds writes that happened later.
    """
    batch, heads, ends = indptr.shape
    pointers = (
        address(indptr, torch.int32, (batch, heads, ends)),
        address(num_partial, torch.int32, (batch, heads, ends - 1)),
        address(indices, torch.int32, (len(indices),)),
        address(masks, torch.int32, (len(indices),)),
    )
    sizes = (batch * heads, ends - 1, visited, num_masks, indices.numel())
    code = library.dynaxx_cpu_plan_check(*pointers, *sizes)
    if code == BAD_INPUT:
        raise ValueError(
            "`layout` was written to after it was checked, and its values are now out of range; "
            "call layout.validate() for details"
        )
    raise_for_status(code)


@never_traced
def row_order(indptr: Tensor, library: CDLL) -> Tensor:
    """Return the rows of each head of a (batch, heads, rows + 1) CSR, longest first: (batch, heads, rows) int32."""
    batch, heads, ends = indptr.shape
    order = torch.empty(batch, heads, ends - 1, dtype=torch.int32, device="cpu")
    starts, target = (address(x, torch.int32, x.shape) for x in (indptr, order))
    raise_for_status(library.dynaxx_cpu_plan_rows(starts, batch * heads, ends - 1, target))
    return order


@never_traced
def visit_ranks(indptr: Tensor, indices: Tensor, visited_blocks: int, library: CDLL) -> Tensor:
    """Count for each entry of a (batch, heads, rows + 1) CSR how many earlier rows visit the same block."""
    batch, heads, ends = indptr.shape
    counts, ranks = torch.empty(visited_blocks, dtype=torch.int32, device="cpu"), torch.empty_like(indices)
    read, written = ([address(x, torch.int32, x.shape) for x in pair] for pair in ((indptr, indices), (counts, ranks)))
    code = library.dynaxx_cpu_plan_ranks(*read, batch * heads, ends - 1, visited_blocks, *written)
    raise_for_status(code)
    return ranks


@never_traced
def mask_tables(layout: BlockLayout, library: CDLL, rows_are_keys: bool = False) -> tuple[Tensor, Tensor]:
    """Return the element masks per panel of the rows' side: bits for each visited token, and runs of visible tokens.

    Returns:
        words (num_masks, block / PANEL, visited_block) int16, where bit i is token i of the panel; runs (num_masks,
        block / PANEL, MAX_RUNS, 2) uint8, begin and end of each run, empty after the last.
    """
    q_block, kv_block = layout.block_size
    block, visited_block = (kv_block, q_block) if rows_are_keys else (q_block, kv_block)
    bits = layout.masks.bits.contiguous()
    shape = (len(layout.masks), block // PANEL)
    words = torch.empty(*shape, visited_block, dtype=torch.int16, device="cpu")
    runs = torch.empty(*shape, MAX_RUNS, 2, dtype=torch.uint8, device="cpu")
    source = address(bits, torch.int32, (shape[0], q_block, -(-kv_block // 32)))
    targets = address(words, torch.int16, words.shape), address(runs, torch.uint8, runs.shape)
    code = library.dynaxx_cpu_plan_masks(source, shape[0], q_block, kv_block, rows_are_keys, *targets)
    raise_for_status(code)
    return words, runs
