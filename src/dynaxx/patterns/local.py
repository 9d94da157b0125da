# SPDX-License-Identifier: Apache-2.0
"""Patterns on the distance between query and key: full, sliding window, dilated window, strided."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any

import numpy as np
from typing_extensions import override

from dynaxx.layout import BlockGrid
from dynaxx.patterns import program
from dynaxx.patterns.base import BandRule, DistanceRule
from dynaxx.patterns.runs import Ints, Runs, Visited, band, beyond
from dynaxx.settings import Positive, Range

Side = Annotated[int, Range(-1)]  # keys on one side of the query; -1 for all


@dataclass(frozen=True)
class Full(DistanceRule, kind="full"):
    """Every pair."""

    @override
    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        return distance == distance

    @override
    def mask_kinds(self, grid: BlockGrid, first: Ints) -> Ints:
        return np.zeros_like(first)

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return program.band(None, None)

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        touched = band(grid, 0 if grid.causal else None, None).touched
        return Visited(touched, touched)


@dataclass(frozen=True)
class SlidingWindow(BandRule, kind="sliding_window"):
    """`window` keys including the query's own; or `left` keys before and `right` keys after it, -1 for all.

    Args:
        window: an int W shows W keys including the query's own, as `sliding_window=W` in transformers; without
            causality it also shows the W - 1 keys after the query. A pair (left, right) is FlashAttention's
            `window_size`: keys visible besides the query's own on each side, -1 for unlimited.
    """

    window: Positive | tuple[Side, Side]

    @override
    def limits(self, grid: BlockGrid) -> tuple[int | None, int | None]:
        left, right = (self.window - 1, self.window - 1) if isinstance(self.window, int) else self.window
        if grid.causal:
            right = 0
        far = beyond(grid)
        left, right = min(left, far), min(right, far)
        return (None if right < 0 else -right), (None if left < 0 else left)

    @override
    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal


@dataclass(frozen=True)
class Dilated(DistanceRule, kind="dilated"):
    """`window` keys including the query's own, `dilation` tokens apart (Longformer).

    Without causality it shows as many keys after the query.
    """

    window: Positive
    dilation: Positive

    def _reach(self) -> SlidingWindow:
        reach = (self.window - 1) * self.dilation
        return SlidingWindow((reach, reach))

    def _apart(self, grid: BlockGrid) -> int:
        """Return the dilation, or a distance that no two tokens of the grid have."""
        return min(self.dilation, beyond(grid))

    @override
    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    @override
    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        return self._reach().shows(grid, distance) & (distance % self._apart(grid) == 0)

    @override
    def mask_kinds(self, grid: BlockGrid, first: Ints) -> Ints:
        return self._reach().mask_kinds(grid, first)

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        apart = [program.Op.MULTIPLES, self._apart(grid)]
        return [*self._reach().program(grid), *apart, program.Op.ALL, 2]

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        reach = self._reach().visited(grid)
        return reach if self.dilation == 1 else Visited(reach.touched, Runs.none())


@dataclass(frozen=True)
class Strided(DistanceRule, kind="strided"):
    """Keys whose distance from the query is a multiple of `stride`.

    This is the long-range half of the Sparse Transformer, `SlidingWindow(stride) | Strided(stride)`.
    """

    stride: Annotated[int, Range(1, tries=(1, 3, 16, 40, 97, 150))]

    @override
    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        return distance % self._apart(grid) == 0

    def _apart(self, grid: BlockGrid) -> int:
        """Return the stride, or a distance that no two tokens of the grid have."""
        return min(self.stride, beyond(grid))

    @override
    def mask_kinds(self, grid: BlockGrid, first: Ints) -> Ints:
        apart = self._apart(grid)
        return first % apart // gcd(apart, *grid.block_size)

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return [program.Op.MULTIPLES, self._apart(grid)]

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        if self.stride == 1:
            return Full().visited(grid)
        if self.stride <= sum(grid.block_size):
            return Visited(Full().visited(grid).touched, Runs.none())
        reach = max(grid.seqlen_q, grid.seqlen_k) // self.stride + 1
        lines = np.arange(reach - 1, -1 if grid.causal else -reach - 1, -1) * self._apart(grid)
        first, last = (span - lines[:, None] for span in grid.spans())
        start = np.minimum(np.maximum(first, 0) // grid.block_size[1], grid.kv_blocks)
        end = np.minimum(last, grid.seqlen_k - 1) // grid.block_size[1] + 1
        return Visited(Runs(start, np.maximum(start, end)), Runs.none())
