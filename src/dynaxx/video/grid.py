# SPDX-License-Identifier: Apache-2.0
"""`Grid`: the tokens of a video or an image, and orders in which neighbours in space and time share a block.

Legend: t, y, x = frame, row and column of a token. Models store tokens frame by frame and row by row, with text before
or after them. Attention over blocks uses the grid's order, with the text behind all other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.settings import Count, Positive, check_settings

Order = Literal["bars", "hilbert", "raster"]
Ints = NDArray[np.int64]


class Boxes(NamedTuple):
    """Bounding boxes of runs of tokens in a grid's order."""

    low: Ints  # (n, 3) smallest frame, row and column
    high: Ints  # (n, 3) largest frame, row and column, inclusive
    text: NDArray[np.bool_]  # (n,) whether a token of the run is text


@dataclass(frozen=True)
class Grid:
    """The tokens that a diffusion transformer attends over.

    Args:
        frames, height, width: latent frames, rows and columns, in tokens; an image has one frame.
        text: number of text tokens in the same sequence.
        text_first: whether the model stores the text before the video.
        order: "bars" cuts frames and rows into bars of about 4 x 4 and goes along each, column by column, so that any
            run of tokens is compact whatever the sizes are; "hilbert" follows a Hilbert curve; "raster" keeps the
            model's order.

    Raises:
        TypeError, ValueError: a size is not an integer, or is too small; the order is unknown.
    """

    frames: Positive
    height: Positive
    width: Positive
    text: Count = 0
    text_first: bool = False
    order: Order = "bars"

    def __post_init__(self) -> None:
        """Check the sizes and the order."""
        if self.order not in ORDERS:
            raise ValueError(f"`order` must be one of {tuple(ORDERS)}, got {self.order!r}")
        check_settings(self, Grid)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (frames, height, width)."""
        return self.frames, self.height, self.width

    @property
    def tokens(self) -> int:
        """Return the number of tokens without the text."""
        return prod(self.shape)

    @property
    def seqlen(self) -> int:
        """Return the number of all tokens."""
        return self.tokens + self.text

    @property
    def is_identity(self) -> bool:
        """Return whether the order is the model's own."""
        return self.order == "raster" and not (self.text and self.text_first)

    def permutation(self, device: torch.device | str = "cpu") -> Tensor:
        """Return (seqlen,) int64: the model's position of each token of the order. Cached."""
        return _indices(self, torch.device(device))[0]

    def inverse(self, device: torch.device | str = "cpu") -> Tensor:
        """Return (seqlen,) int64: the place in the order of each of the model's positions. Cached."""
        return _indices(self, torch.device(device))[1]

    def ordered(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return a tensor whose tokens lie along `dim` in the model's order, in the order of the grid."""
        return x if self.is_identity else x.index_select(dim, self.permutation(x.device))

    def restored(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return a tensor whose tokens lie along `dim` in the order of the grid, in the model's order."""
        return x if self.is_identity else x.index_select(dim, self.inverse(x.device))

    def boxes(self, first: Ints, last: Ints) -> Boxes:
        """Return the bounding boxes of the tokens first .. last of the order, (n,) each.

        Positions before the first token count as the first one. Positions behind the last token count as text.
        """
        low, high = _running_boxes(self, int((last - first).max(initial=0)) + 1)
        begin, end = (np.minimum(np.maximum(side, 0), self.tokens - 1) for side in (first, last))
        return Boxes(*_joined(low, high, begin, end), last >= self.tokens)


def _joined(low: Ints, high: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return boxes of runs from boxes of windows of 2^i tokens, two of which cover each run."""
    level = np.log2(np.maximum(end - begin + 1, 1)).astype(np.int64)
    other = end - 2**level + 1
    return np.minimum(low[level, begin], low[level, other]), np.maximum(high[level, begin], high[level, other])


@lru_cache(maxsize=8)
def _running_boxes(grid: Grid, longest: int) -> tuple[Ints, Ints]:
    """Return (levels, tokens, 3) bounding boxes of the 2^level tokens from each token of the order."""
    lows, highs = [_coordinates(grid)], [_coordinates(grid)]
    for level in range(min(longest, grid.tokens).bit_length() - 1):
        step = 2**level
        for boxes, join in ((lows, np.minimum), (highs, np.maximum)):
            wider = boxes[-1].copy()
            wider[:-step] = join(boxes[-1][:-step], boxes[-1][step:])
            boxes.append(wider)
    return np.stack(lows), np.stack(highs)


def _coordinates(grid: Grid) -> Ints:
    """Return (tokens, 3): frame, row and column of each token in the order of the grid."""
    places = _places(grid)
    return np.stack(np.unravel_index(places, grid.shape), -1).astype(np.int64)


@lru_cache(maxsize=64)
def _places(grid: Grid) -> Ints:
    """Return (tokens,): the place in the model's order of each token of the order, without the text."""
    t, y, x = (axis.ravel() for axis in np.indices(grid.shape))
    found: Ints = np.lexsort(ORDERS[grid.order](grid, t, y, x)[::-1])
    return found


@LayoutCache
@on_host
def _indices(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    text_at = 0 if grid.text_first else grid.tokens
    places = _places(grid) + (grid.text if grid.text_first else 0)
    order = torch.from_numpy(np.concatenate([places, text_at + np.arange(grid.text)]))
    return order.to(device), order.argsort().to(device)


def _raster(grid: Grid, t: Ints, y: Ints, x: Ints) -> tuple[Ints, ...]:
    """Return the sort keys of the model's own order, the most significant first."""
    return t, y, x


def _bars(grid: Grid, t: Ints, y: Ints, x: Ints) -> tuple[Ints, ...]:
    """Return the sort keys of bars along the columns; each bar starts where the one before it ends."""
    thick = min(grid.frames, 4)  # 64 tokens of a bar are about 4 x 4 x 4, or 8 x 8 in an image
    part_t, part_y = _parts(t, grid.frames, thick), _parts(y, grid.height, round((64 / thick) ** 0.5))
    bar_y = np.where(part_t % 2 == 0, part_y, part_y.max() - part_y)
    backwards = (part_t * (part_y.max() + 1) + bar_y) % 2 == 1
    return part_t, bar_y, np.where(backwards, grid.width - 1 - x, x), t, y


def _parts(at: Ints, size: int, most: int) -> Ints:
    """Return the part of each position after an axis is cut into the fewest parts of at most `most`, nearly equal."""
    parts = -(-size // most)
    return at * parts // size


def _hilbert(grid: Grid, t: Ints, y: Ints, x: Ints) -> tuple[Ints, ...]:
    """Return the place of each token on the Hilbert curve of the smallest cube of 2^n that holds the grid.

    An image, which has one frame, follows the curve of a square. The steps are those of Skilling (AIP 707, 2004).
    """
    axes = [axis.copy() for axis in ((t, y, x) if grid.frames > 1 else (y, x))]
    bits = max(1, (max(grid.shape) - 1).bit_length())
    for level in range(bits - 1, 0, -1):
        low = (1 << level) - 1
        for axis in axes:
            flip = (axis >> level & 1).astype(bool)
            swapped = np.where(flip, 0, (axes[0] ^ axis) & low)
            axes[0] ^= np.where(flip, low, swapped)
            axis ^= swapped if axis is not axes[0] else 0
    for before, axis in pairwise(axes):
        axis ^= before
    turn = np.zeros_like(x)
    for level in range(bits - 1, 0, -1):
        turn ^= np.where(axes[-1] >> level & 1, (1 << level) - 1, 0)
    index = np.zeros_like(x)
    for level in range(bits - 1, -1, -1):
        for axis in axes:
            index = index << 1 | (axis ^ turn) >> level & 1
    return (index,)


ORDERS = {"bars": _bars, "hilbert": _hilbert, "raster": _raster}
