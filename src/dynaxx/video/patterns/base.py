# SPDX-License-Identifier: Apache-2.0
"""`GridPattern`, the base of rules over frames, rows and columns, and `OnGrid`, such a rule for the tokens of one grid.

A rule says which pairs of blocks it shows from the bounding boxes of their tokens, so that its layouts cost one small
computation per pair of blocks. Blocks with text tokens see and are seen by every block.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, whole_or_nothing
from dynaxx.patterns.runs import Runs, Visited
from dynaxx.video.grid import Boxes, Grid, Ints

Shown = NDArray[np.bool_]


class GridPattern(Pattern):
    """A rule over frames, rows and columns. A subclass must define `shows_blocks`.

    The rule has no layout until `on` binds it to a grid, which differs from call to call.
    """

    stands_alone: ClassVar[bool] = False

    @abstractmethod
    def shows_blocks(self, q: Boxes, k: Boxes) -> Shown:
        """Return which pairs of blocks are visible as a whole.

        Args:
            q: boxes of the q blocks, whose arrays are (q_blocks, 1, ...).
            k: boxes of the kv blocks, (1, kv_blocks, ...).
        """

    def on(self, grid: Grid) -> OnGrid:
        """Return this rule for the tokens of a grid, in the order of the grid."""
        return OnGrid(self, grid)

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        raise self._unbound()

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        raise self._unbound()

    def _unbound(self) -> ValueError:
        return ValueError(f"`{self!r}` must be bound to a grid: call its `on`, with Grid(frames, height, width)")


@dataclass(frozen=True)
class OnGrid(Pattern):
    """A rule over frames, rows and columns for the tokens of one grid."""

    rule: GridPattern
    grid: Grid

    @property
    @override
    def by_blocks(self) -> bool:
        return True

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        rows = ((q_pos - grid.offset) // grid.block_size[0]).clamp(0, grid.q_blocks - 1)
        return torch.from_numpy(_shown(self, grid))[rows, k_pos // grid.block_size[1]]

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        runs = _runs_of(_shown(self, grid))
        return Visited(runs, runs)

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        return whole_or_nothing(_shown(self, blocks.grid)[blocks.rows, blocks.cols])


def gaps(q: Boxes, k: Boxes, axis: int) -> Ints:
    """Return the distance along an axis between the nearest tokens of two blocks; 0 where they overlap."""
    apart = np.maximum(q.low[..., axis] - k.high[..., axis], k.low[..., axis] - q.high[..., axis])
    return np.maximum(apart, 0)


@lru_cache(maxsize=64)
def _shown(bound: OnGrid, grid: BlockGrid) -> Shown:
    """Return (q_blocks, kv_blocks) bool: the visible pairs of blocks."""
    q_first = np.arange(grid.q_blocks) * grid.block_size[0] + grid.offset
    q, k = (
        _boxes(bound.grid, first, size, grid.seqlen_k)
        for first, size in zip((q_first, np.arange(grid.kv_blocks) * grid.block_size[1]), grid.block_size, strict=True)
    )
    q = Boxes(q.low[:, None], q.high[:, None], q.text[:, None])
    k = Boxes(k.low[None], k.high[None], k.text[None])
    return np.asarray(bound.rule.shows_blocks(q, k) | q.text | k.text)


def _boxes(grid: Grid, first: Ints, size: int, seqlen: int) -> Boxes:
    """Return the boxes of blocks; only tokens that exist count as text."""
    boxes = grid.boxes(first, first + size - 1)
    return boxes._replace(text=np.minimum(first + size, seqlen) > grid.tokens)


def _runs_of(shown: Shown) -> Runs:
    """Return the runs of True in each row."""
    rows, cols = shown.shape
    edges = np.diff(shown.astype(np.int8), prepend=0, append=0, axis=1)
    (row, start), (_, end) = (edges == 1).nonzero(), (edges == -1).nonzero()
    count = np.bincount(row, minlength=rows)
    slot = np.arange(len(row)) - (count.cumsum() - count)[row]
    runs = Runs(*np.full((2, count.max(initial=0), rows), cols, np.int64))
    runs.start[slot, row], runs.end[slot, row] = start, end
    return runs
