# SPDX-License-Identifier: Apache-2.0
"""The pattern of a window in space and time."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Combined, Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, whole_or_nothing
from dynaxx.patterns.runs import Runs, Visited
from dynaxx.selection import Hybrid, Selector
from dynaxx.settings import Count, Positive
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


@dataclass(frozen=True)
class GridWindow(GridPattern, kind="grid_window"):
    """The tokens within a window around the query (Sliding Tile Attention).

    `GridWindow(frames=3)` is a spatial head and `GridWindow(height=9, width=9)` a temporal one (Sparse VideoGen).

    Args:
        frames, height, width: size of the window, with `size // 2` tokens on each side of the query; None is unlimited.
    """

    frames: Positive | None = None
    height: Positive | None = None
    width: Positive | None = None

    @override
    def shows_blocks(self, q: Boxes, k: Boxes) -> Shown:
        shown = np.ones(np.broadcast_shapes(q.text.shape, k.text.shape), np.bool_)
        for axis, size in enumerate((self.frames, self.height, self.width)):
            if size is not None:
                shown &= gaps(q, k, axis) <= size // 2
        return shown


@dataclass(frozen=True)
class RadialDecay(GridPattern, kind="radial_decay"):
    """A window whose area halves whenever the distance in frames doubles (Radial Attention).

    At d >= 1 frames the sides are those of one frame times 2 ** (-floor(log2(d)) / 2). The query's own place stays
    visible in every frame.

    Args:
        height, width: sides of the window in the query's own frame and its neighbours.
    """

    height: Positive
    width: Positive

    @override
    def shows_blocks(self, q: Boxes, k: Boxes) -> Shown:
        halvings = np.floor(np.log2(np.maximum(gaps(q, k, 0), 1)))
        share = 2.0 ** (-halvings / 2)
        shown: Shown = (gaps(q, k, 1) <= self.height * share // 2) & (gaps(q, k, 2) <= self.width * share // 2)
        return shown


@dataclass(frozen=True)
class FirstFrames(GridPattern, kind="first_frames"):
    """The first frames, in both directions: an anchor for the whole video.

    Args:
        frames: number of frames; 0 shows the text alone.
    """

    frames: Count = 1

    @override
    def shows_blocks(self, q: Boxes, k: Boxes) -> Shown:
        shown: Shown = (q.low[..., 0] < self.frames) | (k.low[..., 0] < self.frames)
        return shown


def on_grid(rule: Any, grid: Grid) -> Any:
    """Bind a pattern, a selector or a hybrid to a grid. Selectors also show the text.

    Args:
        rule: the rule; patterns that are not `GridPattern`s stay as they are, and count in the grid's order.
        grid: the tokens.
    """
    if isinstance(rule, Selector):
        return FirstFrames(0).on(grid) | rule if grid.text else rule
    if isinstance(rule, Hybrid):
        return replace(rule, pattern=on_grid(rule.pattern, grid))
    if isinstance(rule, Combined):
        return replace(rule, parts=tuple(on_grid(part, grid) for part in rule.parts))
    return rule.on(grid) if isinstance(rule, GridPattern) else rule
