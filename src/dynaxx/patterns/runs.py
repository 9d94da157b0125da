"""Runs of neighbouring kv blocks per row, and their union, intersection and difference, without listing a block.

A set of runs is a count: a run adds 1 where it starts and takes 1 away where it ends. So sets are put together by
sorting starts and ends apart. Where `k` of them hold, the i-th end closes what the (i + k - 1)-th start opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """kv blocks start .. end - 1 of each row; a row's runs ascend and do not overlap, start == end is an empty one."""

    start: Tensor  # (rows, n) int64, or (1, n) where all rows have the same
    end: Tensor

    @classmethod
    def one(cls, start: Tensor, end: Tensor) -> Runs:
        """At most one run per row, empty where end < start."""
        return cls(start[:, None], torch.maximum(start, end)[:, None])

    @classmethod
    def none(cls) -> Runs:
        """No block of any row."""
        return cls(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64))

    def within(self, other: Runs) -> Runs:
        """The part of each run that lies in the one run of `other`."""
        start = torch.maximum(self.start, other.start)
        return Runs(start, torch.maximum(start, torch.minimum(self.end, other.end)))

    def lengths(self, rows: int) -> Tensor:
        """(rows,) blocks of each row."""
        return (self.end - self.start).sum(1).expand(rows)

    def columns(self, rows: int) -> Tensor:
        """kv blocks of all rows, row by row."""
        start, count = self.start.expand(rows, -1).flatten(), (self.end - self.start).expand(rows, -1).flatten()
        before = start - (count.cumsum(0) - count)
        shift = torch.repeat_interleave(before, count)
        return shift.add_(torch.arange(len(shift)))

    def blocks(self, rows: int) -> tuple[Tensor, Tensor]:
        """Row and kv block of each block of all rows, row by row."""
        return torch.repeat_interleave(torch.arange(rows), self.lengths(rows)), self.columns(rows)


def any_of(parts: Sequence[Runs]) -> Runs:
    """Blocks in any of the parts."""
    parts = [part for part in parts if part.start.shape[1]]
    if len(parts) < 2:
        return parts[0] if parts else Runs.none()
    ends = _in_order([part.end for part in parts])
    return _between(_in_order([part.start for part in parts]), ends)


def all_of(parts: Sequence[Runs]) -> Runs:
    """Blocks in all of the parts."""
    first, *others = sorted(parts, key=lambda part: -part.start.shape[1])
    for other in others:
        first = _both(first, other)
    return first


def without(a: Runs, b: Runs) -> Runs:
    """Blocks of `a` that are not in `b`, all of which must be in `a`."""
    if not b.start.shape[1]:
        return a
    return Runs(_in_order([a.start, b.end]), _in_order([b.start, a.end]))


def beside(*parts: Runs) -> Runs:
    """The runs of one part after those of the other; they need not ascend."""
    return Runs(_joined([part.start for part in parts]), _joined([part.end for part in parts]))


def _both(a: Runs, b: Runs) -> Runs:
    if not b.start.shape[1]:
        return b
    if b.start.shape[1] == 1:
        return a.within(b)
    return _between(_in_order([a.start, b.start])[:, 1:], _in_order([a.end, b.end])[:, :-1])


def _between(start: Tensor, end: Tensor) -> Runs:
    """Runs from starts and ends in order, each from where the one before it ends."""
    begin = start.clone()
    torch.maximum(start[:, 1:], end[:, :-1], out=begin[:, 1:])
    return Runs(begin, torch.maximum(begin, end))


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    joined = _joined(parts)
    return joined if bool((joined[:, 1:] >= joined[:, :-1]).all()) else joined.sort(1).values


def _joined(parts: Sequence[Tensor]) -> Tensor:
    rows = next((part.shape[0] for part in parts if part.shape[0] != 1), 1)
    return torch.cat([part if part.shape[0] == rows else part.expand(rows, -1) for part in parts], 1)
