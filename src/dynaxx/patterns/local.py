"""Rules on the distance between query and key: full, causal, sliding window, dilated window, strided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import BlockStates, Pattern, Visited
from dynaxx.patterns.runs import Runs


def _distance(grid: BlockGrid, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest and largest query-minus-key distance in each block, and the distance of its first pair (the key of every
    rule on distances). Blocks cut by the end of a sequence count whole: their masks are those of any other block."""
    q_block, kv_block = grid.block_size
    first = rows * q_block + grid.offset - cols * kv_block
    return first - (kv_block - 1), first + (q_block - 1), first


def band(grid: BlockGrid, lo: int | None, hi: int | None) -> Visited:
    """The blocks of the band lo <= distance <= hi, None where unlimited."""
    first, last = grid.spans()
    q_block, kv_block = grid.block_size
    start = torch.zeros_like(first) if hi is None else (first - hi).clamp(min=0) // kv_block
    end = torch.full_like(first, grid.kv_blocks)
    if lo is not None:
        end = torch.div((last - lo).clamp(max=grid.seqlen_k - 1), kv_block, rounding_mode="floor") + 1
    touched = Runs.one(start, end)
    full_start = start if hi is None else -torch.div(hi + 1 - q_block - first, kv_block, rounding_mode="floor")
    full_end = end if lo is None else torch.div(first + 1 - lo, kv_block, rounding_mode="floor")
    return Visited(touched, Runs.one(full_start, full_end).within(touched))


@dataclass(frozen=True)
class Full(Pattern):
    """Every pair."""

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return torch.ones_like(q_pos - k_pos, dtype=torch.bool)

    def visited(self, grid: BlockGrid) -> Visited:
        touched = band(grid, 0 if grid.causal else None, None).touched
        return Visited(touched, touched)

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        every = torch.ones_like(rows, dtype=torch.bool)
        return BlockStates(every, ~every, torch.zeros_like(rows))


@dataclass(frozen=True)
class Causal(Pattern):
    """Keys at or before the query."""

    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def visited(self, grid: BlockGrid) -> Visited:
        return band(grid, 0, None)

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        nearest, farthest, first = _distance(grid, rows, cols)
        return BlockStates(nearest >= 0, (nearest < 0) & (farthest >= 0), first)


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Keys near the query.

    Args:
        window: an int W sees W keys including the query's own (transformers' `sliding_window=W`), and without causality
            W - 1 keys after it too; a pair is FlashAttention's `window_size` = (left, right), keys visible besides self
            on each side, -1 for unlimited.
    """

    window: int | tuple[int, int]

    def __post_init__(self) -> None:
        if isinstance(self.window, int):
            if self.window < 1:
                raise ValueError(f"`window` must be >= 1 keys, got {self.window}")
        elif len(self.window) != 2 or min(self.window) < -1:
            raise ValueError(f"`window` must be an int or (left, right) with values >= -1, got {self.window!r}")
        else:
            object.__setattr__(self, "window", tuple(self.window))

    def _limits(self, grid: BlockGrid) -> tuple[int | None, int | None]:
        """The band lo <= query - key <= hi, None where unlimited."""
        left, right = (self.window - 1, self.window - 1) if isinstance(self.window, int) else self.window
        if grid.causal:
            right = 0
        return (None if right < 0 else -right), (None if left < 0 else left)

    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        lo, hi = self._limits(grid)
        distance = q_pos - k_pos
        seen = torch.ones_like(distance, dtype=torch.bool)
        if lo is not None:
            seen &= distance >= lo
        if hi is not None:
            seen &= distance <= hi
        return seen

    def visited(self, grid: BlockGrid) -> Visited:
        return band(grid, *self._limits(grid))

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        lo, hi = self._limits(grid)
        nearest, farthest, first = _distance(grid, rows, cols)
        full, touched = torch.ones_like(rows, dtype=torch.bool), torch.ones_like(rows, dtype=torch.bool)
        if lo is not None:
            full, touched = full & (nearest >= lo), touched & (farthest >= lo)
        if hi is not None:
            full, touched = full & (farthest <= hi), touched & (nearest <= hi)
        return BlockStates(full, touched & ~full, first)


@dataclass(frozen=True)
class Dilated(Pattern):
    """A dilated window (Longformer): `window` keys including the query's own, `dilation` tokens apart.

    Without causality as many on the other side.
    """

    window: int
    dilation: int

    def __post_init__(self) -> None:
        if self.window < 1 or self.dilation < 1:
            raise ValueError(f"`window` and `dilation` must be >= 1, got {self.window} and {self.dilation}")

    def _reach(self) -> SlidingWindow:
        reach = (self.window - 1) * self.dilation
        return SlidingWindow((reach, reach))

    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self._reach().visible(grid, q_pos, k_pos) & ((q_pos - k_pos) % self.dilation == 0)

    def visited(self, grid: BlockGrid) -> Visited:
        reach = self._reach().visited(grid)
        return reach if self.dilation == 1 else Visited(reach.touched, Runs.none())

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        return _every_nth(self._reach().classify(grid, rows, cols), grid, rows, cols, self.dilation)


@dataclass(frozen=True)
class Strided(Pattern):
    """Keys whose distance from the query is a multiple of `stride`: the long-range half of the Sparse Transformer
    (`SlidingWindow(stride) | Strided(stride)`)."""

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"`stride` must be >= 1, got {self.stride}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos) % self.stride == 0

    def visited(self, grid: BlockGrid) -> Visited:
        if self.stride == 1:
            return Full().visited(grid)
        if self.stride <= sum(grid.block_size):
            return Visited(Full().visited(grid).touched, Runs.none())
        reach = max(grid.seqlen_q, grid.seqlen_k) // self.stride + 1
        lines = torch.arange(reach - 1, -1 if grid.causal else -reach - 1, -1) * self.stride
        first, last = (span[:, None] - lines for span in grid.spans())
        start = (first.clamp(min=0) // grid.block_size[1]).clamp(max=grid.kv_blocks)
        end = torch.div(last.clamp(max=grid.seqlen_k - 1), grid.block_size[1], rounding_mode="floor") + 1
        return Visited(Runs(start, torch.maximum(start, end)), Runs.none())

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        return _every_nth(Full().classify(grid, rows, cols), grid, rows, cols, self.stride)


def _every_nth(states: BlockStates, grid: BlockGrid, rows: Tensor, cols: Tensor, step: int) -> BlockStates:
    """Keep of `states` only the pairs whose distance is a multiple of `step`."""
    if step == 1:
        return states
    nearest, farthest, first = _distance(grid, rows, cols)
    met = torch.div(farthest, step, rounding_mode="floor") * step >= nearest
    none = torch.zeros_like(states.full)
    key = torch.where(states.full, first % step + 2**40, first)  # inside the band only the phase matters
    return BlockStates(none, (states.full | states.partial) & met, key)
