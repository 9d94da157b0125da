# SPDX-License-Identifier: Apache-2.0
"""Runs of neighbouring kv blocks per row, and their union, intersection and difference, without listing a block.

A set of runs is a count: a run adds 1 where it starts and takes 1 away where it ends. So sets are put together by
sorting starts and ends apart. Where `k` of them hold, the i-th end closes what the (i + k - 1)-th start opened.

Everything here is numpy: layouts are computed on the host in some dozens of operations on a number per row, and those
of torch cost several times as much each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Runs(NamedTuple):
    """kv blocks start .. end - 1 of each row; a row's runs ascend and do not overlap, start == end is an empty one."""

    start: Ints  # (n, rows), or (n, 1) where all rows have the same
    end: Ints

    @classmethod
    def one(cls, start: Ints, end: Ints) -> Runs:
        """At most one run per row, empty where end < start."""
        return cls(start[None], np.maximum(start, end)[None])

    @classmethod
    def none(cls) -> Runs:
        """No block of any row."""
        return cls(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64))

    def within(self, other: Runs) -> Runs:
        """Return the part of each run that lies in the one run of `other`."""
        start = np.maximum(self.start, other.start)
        return Runs(start, np.maximum(start, np.minimum(self.end, other.end)))

    def lengths(self, rows: int) -> Ints:
        """(rows,) blocks of each row."""
        found: Ints = np.add.reduce(self.end - self.start)
        return found if len(found) == rows else found.repeat(rows)

    def columns(self, rows: int) -> NDArray[np.int32]:
        """kv blocks of all rows, row by row."""
        start, end = (_row_by_row(side, rows) for side in self)
        count = end - start
        start -= count.cumsum()
        start += count
        shift = start.astype(np.int32).repeat(count)
        shift += np.arange(len(shift), dtype=np.int32)
        return shift

    def blocks(self, rows: int) -> tuple[Ints, NDArray[np.int32]]:
        """Row and kv block of each block of all rows, row by row."""
        return np.arange(rows).repeat(self.lengths(rows)), self.columns(rows)


class Visited(NamedTuple):
    """The blocks of each row that a rule may show a pair of, and those among them that it shows whole."""

    touched: Runs
    filled: Runs


def any_of(parts: Sequence[Runs]) -> Runs:
    """Blocks in any of the parts."""
    parts = [part for part in parts if len(part.start)]
    if len(parts) < 2:
        return parts[0] if parts else Runs.none()
    return _between(_in_order([part.start for part in parts]), _in_order([part.end for part in parts]))


def all_of(parts: Sequence[Runs]) -> Runs:
    """Blocks in all of the parts."""
    return reduce(_both, sorted(parts, key=lambda part: -len(part.start)))


def without(a: Runs, b: Runs) -> Runs:
    """Blocks of `a` that are not in `b`, all of which must be in `a`."""
    if not len(b.start):
        return a
    return Runs(_in_order([a.start, b.end]), _in_order([b.start, a.end]))


def beside(*parts: Runs) -> Runs:
    """Return the runs of one part after those of the other; they need not ascend."""
    return Runs(_joined([part.start for part in parts]), _joined([part.end for part in parts]))


def _both(a: Runs, b: Runs) -> Runs:
    if not len(b.start):
        return b
    if len(b.start) == 1:
        return a.within(b)
    return _between(_in_order([a.start, b.start])[1:], _in_order([a.end, b.end])[:-1])


def _between(start: Ints, end: Ints) -> Runs:
    """Return runs from starts and ends in order, each from where the one before it ends."""
    begin = start.copy()
    np.maximum(start[1:], end[:-1], out=begin[1:])
    return Runs(begin, np.maximum(begin, end))


def _in_order(parts: Sequence[Ints]) -> Ints:
    """Of each row the numbers of all parts, ascending. They come in an order that serves most rows; few are sorted."""
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
    """(rows * n,), a copy."""
    if side.shape[1] == rows:
        return side.T.flatten()
    return np.tile(side[:, 0], rows)
