# SPDX-License-Identifier: Apache-2.0
"""The pattern of a window in space and time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from dynaxx.patterns.base import Combined
from dynaxx.selection import Hybrid, Selector
from dynaxx.settings import Count, Positive
from dynaxx.video.grid import Boxes, Grid
from dynaxx.video.patterns.base import GridPattern, Shown, gaps


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
