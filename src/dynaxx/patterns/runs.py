# SPDX-License-Identifier: Apache-2.0
"""Runs of neighbouring kv blocks per row, and their union, intersection and difference, without listing blocks.

A set of runs is a step function: it rises by 1 where a run starts and falls by 1 where a run ends. Sets are therefore
combined by sorting their starts and their ends separately. In the region that at least `k` sets cover, the i-th end
closes the run that the (i + k - 1)-th start opened.

This module uses numpy, because a layout takes dozens of operations on small arrays, and each of them costs several
times as much in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynaxx.layout import BlockGrid

Ints = NDArray[np.int64]


class Runs(NamedTuple):
    """The kv blocks start .. end - 1 of each row.

    The runs of a row ascend and do not overlap. A run with start == end is empty.
    """

    start: Ints  # (n, rows), or (n, 1) if all rows have the same runs
    end: Ints

    @classmethod
    def one(cls, start: Ints, end: Ints) -> Runs:
        """Return at most one run per row, empty where end < start."""
        return cls(start[None], np.maximum(start, end)[None])

    @classmethod
    def none(cls) -> Runs:
        """Return runs without any block."""
        return cls(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64))

    def within(self, other: Runs) -> Runs:
        """Return the part of each run that lies in `other`, which has one run per row."""
        start = np.maximum(self.start, other.start)
        return Runs(start, np.maximum(start, np.minimum(self.end, other.end)))

    def lengths(self, rows: int) -> Ints:
        """Return the (rows,) number of blocks in each row."""
        found: Ints = np.add.reduce(self.end - self.start)
        return found if len(found) == rows else found.repeat(rows)

    def columns(self, rows: int) -> NDArray[np.int32]:
        """Return the kv blocks of all rows, row by row."""
        start, end = (_row_by_row(side, rows) for side in self)
        count = end - start
        start -= count.cumsum()
        start += count
        shift = start.astype(np.int32).repeat(count)
        shift += np.arange(len(shift), dtype=np.int32)
        return shift

    def blocks(self, rows: int) -> tuple[Ints, NDArray[np.int32]]:
        """Return the row and the kv block of every block, row by row."""
        return np.arange(rows).repeat(self.lengths(rows)), self.columns(rows)


class Visited(NamedTuple):
    """The blocks in which a rule may show a pair (`touched`), and those that it shows as a whole (`filled`)."""

    touched: Runs
    filled: Runs


def checked_visited(pattern: object, rows: int, found: object) -> Visited:
    """Return what `visited` of a pattern gave, which may be the user's own code.

    Raises:
        TypeError, ValueError: it is not `Visited`, or its runs are not for `rows` rows of blocks.
    """
    name = type(pattern).__name__
    if not isinstance(found, Visited) or not all(isinstance(runs, Runs) for runs in found):
        raise TypeError(f"`visited` of {name} must return Visited(touched=Runs, filled=Runs), got {found!r:.200}")
    for field, runs in zip(Visited._fields, found, strict=True):
        shapes = [np.shape(side) for side in runs]
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] not in (1, rows):
            raise ValueError(
                f"`{field}` of {name}.visited must have starts and ends (n, {rows} rows of blocks), "
                f"got {shapes[0]} and {shapes[1]}"
            )
    return found


def any_of(parts: Sequence[Runs]) -> Runs:
    """Return the blocks that are in any of the parts."""
    parts = [part for part in parts if len(part.start)]
    if len(parts) < 2:
        return parts[0] if parts else Runs.none()
    return _between(_in_order([part.start for part in parts]), _in_order([part.end for part in parts]))


def all_of(parts: Sequence[Runs]) -> Runs:
    """Return the blocks that are in all of the parts."""
    return reduce(_both, sorted(parts, key=lambda part: -len(part.start)))


def without(a: Runs, b: Runs) -> Runs:
    """Return the blocks of `a` that are not in `b`. All blocks of `b` must be in `a`."""
    if not len(b.start):
        return a
    return Runs(_in_order([a.start, b.end]), _in_order([b.start, a.end]))


def concatenated(*parts: Runs) -> Runs:
    """Return the runs of the parts one after another. The result need not ascend."""
    return Runs(_joined([part.start for part in parts]), _joined([part.end for part in parts]))


def _both(a: Runs, b: Runs) -> Runs:
    if not len(b.start):
        return b
    if len(b.start) == 1:
        return a.within(b)
    return _between(_in_order([a.start, b.start])[1:], _in_order([a.end, b.end])[:-1])


def _between(start: Ints, end: Ints) -> Runs:
    """Return runs from ordered starts and ends, each cut at the end of the run before it."""
    begin = start.copy()
    np.maximum(start[1:], end[:-1], out=begin[1:])
    return Runs(begin, np.maximum(begin, end))


def _in_order(parts: Sequence[Ints]) -> Ints:
    """Return the numbers of all parts per row, ascending. Most rows are in order; only the others are sorted."""
    joined = _joined(parts)
    if joined.shape[1]:
        joined = joined[joined[:, joined.shape[1] * 3 // 4].argsort(kind="stable")]
    wrong = np.logical_or.reduce(joined[1:] < joined[:-1]).nonzero()[0]
    if len(wrong):
        joined[:, wrong] = np.sort(joined[:, wrong].T).T
    return joined


def _joined(parts: Sequence[Ints]) -> Ints:
    joined = np.empty((sum(map(len, parts)), max(part.shape[1] for part in parts)), np.int64)
    done = 0
    for part in parts:
        joined[done : done + len(part)] = part
        done += len(part)
    return joined


def _row_by_row(side: Ints, rows: int) -> Ints:
    """Return a copy of shape (rows * n,), row by row."""
    if side.shape[1] == rows:
        return side.T.flatten()
    return np.tile(side[:, 0], rows)


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
