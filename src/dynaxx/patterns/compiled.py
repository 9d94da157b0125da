"""Layouts from the compiled core, where there is one: those of `build.py` in a fraction of the time."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from dynaxx.core.library import present_library
from dynaxx.layout import BlockGrid
from dynaxx.layout.host import dense_views
from dynaxx.patterns.base import Pattern


def layout_tensors(rule: Pattern, grid: BlockGrid, device: torch.device) -> list[Tensor] | None:
    """The tensors of a layout as `build.on_device` lists them; None where the core is not there, or cannot.

    It cannot where a rule has no `program`, or memory is short.
    """
    program = rule.program(grid)
    library = present_library() if program else None
    if library is None or program is None:
        return None
    sizes = (c_int64 * 7)()
    lengths = (c_int64 * 5)(grid.seqlen_q, grid.seqlen_k, *grid.block_size, grid.causal)
    if library.dynaxx_cpu_static_layout((c_int64 * len(program))(*program), len(program), lengths, sizes):
        return None
    rows, masks = grid.q_blocks, sizes[5] // 2
    shapes = [
        (1, 1, rows + 1),
        (1, 1, rows),
        (sizes[2],),
        (sizes[3],),
        (masks, grid.block_size[0], -(-grid.block_size[1] // 32)),
        (masks, 2),
        (1, 1, rows),  # the order of rows, where there is one
    ]
    cuda = device.type == "cuda"
    total = sum(size + -size % 4 for size in sizes)
    numbers = torch.empty(total, dtype=torch.int32, device="cpu", pin_memory=cuda)
    library.dynaxx_cpu_take_layout(numbers.data_ptr())
    return dense_views(numbers.to(device, non_blocking=cuda), shapes if sizes[6] else shapes[:6])
