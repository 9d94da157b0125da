# SPDX-License-Identifier: Apache-2.0
"""Bands of distances between query and key, and the blocks that they touch."""

from __future__ import annotations

import numpy as np

from dynaxx.layout import BlockGrid
from dynaxx.patterns.runs import Ints, Runs, Visited


def band(grid: BlockGrid, lo: int | None, hi: int | None) -> Visited:
    """Return the blocks of the band lo <= distance <= hi. None means unlimited."""
    first, last = grid.spans()
    q_block, kv_block = grid.block_size
    start = np.zeros_like(first) if hi is None else np.maximum(first - hi, 0) // kv_block
    end = np.full_like(first, grid.kv_blocks)
    if lo is not None:
        end = np.minimum(last - lo, grid.seqlen_k - 1) // kv_block + 1
    touched = Runs.one(start, end)
    full_start = start if hi is None else -((hi + 1 - q_block - first) // kv_block)
    full_end = end if lo is None else (first + 1 - lo) // kv_block
    return Visited(touched, Runs.one(full_start, full_end).within(touched))


def beyond(grid: BlockGrid) -> int:
    """Return a distance greater than that of any two tokens of the grid, padding of the last blocks included."""
    return grid.seqlen_q + grid.seqlen_k + 2 * sum(grid.block_size)


def clipped(grid: BlockGrid, first: Ints, lo: int, hi: int) -> Ints:
    """Return numbers for the distances `first`. Blocks beyond lo or hi share a number, since their masks are equal."""
    step = min(grid.block_size)
    lo, hi = lo - grid.block_size[0] - step, hi + grid.block_size[1] + step
    return (np.minimum(np.maximum(first, lo), hi) - lo) // step
