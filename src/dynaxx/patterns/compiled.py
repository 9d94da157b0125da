# SPDX-License-Identifier: Apache-2.0
"""Build layouts in the compiled core, if it is present. They equal those of `build.py`."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from typing import Protocol

import torch
from torch import Tensor

from dynaxx.core.library import present_library
from dynaxx.core.structures import raise_for_status
from dynaxx.layout import BlockGrid
from dynaxx.layout.host import address, dense_views, never_traced
from dynaxx.patterns.kinds import Blocks, Kinds
from dynaxx.patterns.runs import Visited


class Rule(Protocol):
    """A pattern; `Pattern` documents the methods."""

    @property
    def by_distance(self) -> bool:
        """Return whether the visibility of a pair depends only on the distance from key to query."""

    def within_causality(self, grid: BlockGrid) -> Rule:
        """Return this rule without the pairs that a causal grid hides."""

    def program(self, grid: BlockGrid) -> list[int] | None:
        """Return this rule as numbers for the compiled core."""

    def visited(self, grid: BlockGrid) -> Visited:
        """Return runs of blocks that hold every visible pair."""

    def kinds(self, blocks: Blocks) -> Kinds:
        """Return the element masks of some blocks."""


@never_traced
def layout_tensors(rule: Rule, grid: BlockGrid, device: torch.device) -> list[Tensor] | None:
    """Build the tensors of a layout, in the order that `build.on_device` lists them.

    Return None if the core is missing, if the rule has no `program` or one that the core does not know, or if memory
    is short.
    """
    program = rule.program(grid)
    library = present_library() if program else None
    if library is None or program is None:
        return None
    sizes, built = (c_int64 * 7)(), c_void_p()
    lengths = (c_int64 * 5)(grid.seqlen_q, grid.seqlen_k, *grid.block_size, grid.causal)
    numbers = (c_int64 * len(program))(*program)
    if library.dynaxx_cpu_static_layout(numbers, len(program), lengths, sizes, byref(built)):
        return None
    try:
        total = sum(size + -size % 4 for size in sizes)
        found = torch.empty(total, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    except BaseException:
        library.dynaxx_cpu_take_layout(built, None, 0)
        raise
    raise_for_status(library.dynaxx_cpu_take_layout(built, address(found, torch.int32, (total,)), total))
    rows, masks = grid.q_blocks, sizes[5] // 2
    shapes = [
        (1, 1, rows + 1),
        (1, 1, rows),
        (sizes[2],),
        (sizes[3],),
        (masks, grid.block_size[0], -(-grid.block_size[1] // 32)),
        (masks, 2),
        (1, 1, rows),  # the order of rows, if there is one
    ]
    return dense_views(found.to(device, non_blocking=device.type == "cuda"), shapes if sizes[6] else shapes[:6])
