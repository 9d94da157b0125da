# SPDX-License-Identifier: Apache-2.0
"""The pattern of a window in space and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from dynaxx.settings import Positive
from dynaxx.video.grid import Boxes
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
