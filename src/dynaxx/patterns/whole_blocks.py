# SPDX-License-Identifier: Apache-2.0
"""Patterns of whole kv blocks: the nearest blocks and random blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, whole_or_nothing
from dynaxx.patterns.program import Op
from dynaxx.patterns.runs import Ints, Runs, Visited
from dynaxx.settings import Range

ROW_FACTOR = 0x9E3779B1  # of the hash of random blocks; core/source has it too


@dataclass(frozen=True)
class LocalBlocks(Pattern, kind="local_blocks"):
    """The last `blocks` whole kv blocks up to the one in which the q block ends.

    It visits as many blocks as a sliding window of (blocks - 1) * kv_block + 1 tokens and shows more keys.
    """

    blocks: Annotated[int, Range(1, tries=(1, 2, 3))]

    @property
    @override
    def by_blocks(self) -> bool:
        return True

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        q_block, kv_block = grid.block_size
        row = (q_pos - grid.offset) // q_block
        last = ((row + 1) * q_block - 1 + grid.offset) // kv_block
        return (k_pos // kv_block <= last) & (k_pos // kv_block > last - self._count(grid))

    def _count(self, grid: BlockGrid) -> int:
        """Return the number of blocks, limited to those between the last row's end and the first key."""
        return min(self.blocks, grid.kv_blocks + grid.block_size[0])

    def _reach(self, grid: BlockGrid) -> tuple[Ints, Ints]:
        """Return the first and last kv block of each row, which may lie outside the grid."""
        last = (grid.spans()[0] + grid.block_size[0] - 1) // grid.block_size[1]
        return last - self._count(grid) + 1, last

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        first, last = self._reach(grid)
        runs = Runs.one(np.maximum(first, 0), np.minimum(last + 1, grid.kv_blocks))
        return Visited(runs, runs)

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        first, last = (x.take(blocks.rows) for x in self._reach(blocks.grid))
        return whole_or_nothing((blocks.cols >= first) & (blocks.cols <= last))

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return [Op.LOCAL_BLOCKS, self._count(grid)]


@dataclass(frozen=True)
class RandomBlocks(Pattern, kind="random_blocks"):
    """`blocks` random kv blocks per q block, one from each of as many equal shares of the visible ones (BigBird).

    A counter-based hash of (seed, row, share) draws them, so they are the same on every device and machine. Rows count
    from the first key, so that a chunk of a prompt, if it starts with a block, has the blocks of the whole prompt.
    """

    blocks: Annotated[int, Range(0, tries=(0, 1, 2, 4))]
    seed: int = 0

    @property
    @override
    def by_blocks(self) -> bool:
        return True

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        rows = ((q_pos - grid.offset) // grid.block_size[0]).clamp(0, grid.q_blocks - 1)
        return torch.from_numpy(self._holds(grid, rows.numpy(), (k_pos // grid.block_size[1]).numpy()))

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        cols = drawn_blocks(self, grid).T
        start = np.maximum(cols, 0)
        runs = Runs(start, start + (cols >= 0))
        return Visited(runs, runs)

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        return whole_or_nothing(self._holds(blocks.grid, blocks.rows, blocks.cols))

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return [Op.RANDOM_BLOCKS, min(self.blocks, grid.kv_blocks), _hash_start(self.seed, grid)]

    def _holds(self, grid: BlockGrid, rows: Ints, cols: Ints) -> NDArray[np.bool_]:
        """Return whether each row drew the block in `cols`, for rows and columns of any shapes that broadcast."""
        found = np.zeros(np.broadcast_shapes(rows.shape, cols.shape), np.bool_)
        for drawn in drawn_blocks(self, grid).T:
            found |= drawn.take(rows) == cols
        return found


@lru_cache(maxsize=8)
def drawn_blocks(rule: RandomBlocks, grid: BlockGrid) -> Ints:
    """Return the (q_blocks, blocks) random kv blocks of each row.

    A row that sees at most `blocks` blocks gets all of them; its other slots are -1.
    """
    blocks = min(rule.blocks, grid.kv_blocks)  # a row has no more blocks than that
    slot = np.arange(blocks)
    _, last = grid.spans()
    available = last // grid.block_size[1] + 1 if grid.causal else np.full_like(last, grid.kv_blocks)
    available = np.minimum(np.maximum(available, 0), grid.kv_blocks)[:, None]
    low, high = slot * available // max(1, blocks), (slot + 1) * available // max(1, blocks)
    col = low + _hash(_hash_start(rule.seed, grid), np.arange(grid.q_blocks)[:, None], slot) % np.maximum(high - low, 1)
    return np.where(high > low, col, -1)


def _hash(start: int, rows: Ints, slot: Ints) -> Ints:
    """Return a well-mixed 31-bit integer per (row, slot): three rounds of multiply and xor-shift in wrapping int64."""
    x = rows * ROW_FACTOR + slot * 0x85EBCA77 + start
    for _ in range(3):
        x = (x ^ (x >> 29)) * 0x1B873593CC9E2D51
    return (x >> 32) & 0x7FFFFFFF


def _hash_start(seed: int, grid: BlockGrid) -> int:
    """Return the int64 from which the first row of a grid hashes. Rows count from the block of the first key."""
    row = grid.offset // grid.block_size[0]
    return (seed * 0xC2B2AE3D + 0x27D4EB2F + row * ROW_FACTOR + 2**63) % 2**64 - 2**63
