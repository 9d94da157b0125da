# SPDX-License-Identifier: Apache-2.0
"""Patterns on the distance between query and key: full, sliding window, dilated window, strided."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from operator import index
from typing import Any

import numpy as np
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, as_integer
from dynaxx.patterns import program
from dynaxx.patterns.bands import band, beyond, clipped
from dynaxx.patterns.base import DistanceRule
from dynaxx.patterns.runs import Ints, Runs, Visited


@dataclass(frozen=True)
class Full(DistanceRule):
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


@typed
@dataclass(frozen=True)
class SlidingWindow(DistanceRule):
    """Keys near the query.

    Args:
        window: an int W shows W keys including the query's own, as `sliding_window=W` in transformers; without
            causality it also shows the W - 1 keys after the query. A pair (left, right) is FlashAttention's
            `window_size`: keys visible besides the query's own on each side, -1 for unlimited.
    """

    window: int | tuple[int, int]

    def __post_init__(self) -> None:
        """Convert the window to an int or a pair, and check it."""
        given: Any = self.window
        one = not isinstance(given, tuple | list)
        try:
            sides = tuple(index(side) for side in ((given,) if one else given))
        except TypeError:
            sides = ()
        if len(sides) != 2 - one or min(sides) < -1:
            raise ValueError(f"`window` must be an int or (left, right) with values >= -1, got {self.window!r}")
        if one and sides[0] < 1:
            raise ValueError(f"`window` must be >= 1 keys, got {self.window}")
        object.__setattr__(self, "window", sides[0] if one else sides)

    def _limits(self, grid: BlockGrid) -> tuple[int | None, int | None]:
        """Return the bounds of the band lo <= query - key <= hi. None means unlimited."""
        left, right = (self.window - 1, self.window - 1) if isinstance(self.window, int) else self.window
        if grid.causal:
            right = 0
        far = beyond(grid)
        left, right = min(left, far), min(right, far)
        return (None if right < 0 else -right), (None if left < 0 else left)

    @override
    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    @override
    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        lo, hi = self._limits(grid)
        seen = distance == distance if lo is None else distance >= lo
        return seen if hi is None else seen & (distance <= hi)

    @override
    def mask_kinds(self, grid: BlockGrid, first: Ints) -> Ints:
        lo, hi = self._limits(grid)
        return clipped(grid, first, 0 if lo is None else lo, 0 if hi is None else hi)

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return program.band(*self._limits(grid))

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        return band(grid, *self._limits(grid))


@typed
@dataclass(frozen=True)
class Dilated(DistanceRule):
    """A dilated window (Longformer): `window` keys including the query's own, `dilation` tokens apart.

    Without causality it shows as many keys after the query.
    """

    window: int
    dilation: int

    def __post_init__(self) -> None:
        """Check the window and the dilation."""
        object.__setattr__(self, "window", as_integer("window", self.window))
        object.__setattr__(self, "dilation", as_integer("dilation", self.dilation))
        if self.window < 1 or self.dilation < 1:
            raise ValueError(f"`window` and `dilation` must be >= 1, got {self.window} and {self.dilation}")

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


@typed
@dataclass(frozen=True)
class Strided(DistanceRule):
    """Keys whose distance from the query is a multiple of `stride`.

    This is the long-range half of the Sparse Transformer, `SlidingWindow(stride) | Strided(stride)`.
    """

    stride: int

    def __post_init__(self) -> None:
        """Check the stride."""
        object.__setattr__(self, "stride", as_integer("stride", self.stride))
        if self.stride < 1:
            raise ValueError(f"`stride` must be >= 1, got {self.stride}")

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
