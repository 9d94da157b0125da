# SPDX-License-Identifier: Apache-2.0
"""The pattern of a window that shrinks with the distance in time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from dynaxx.settings import Positive
from dynaxx.video.grid import Boxes
from dynaxx.video.patterns.base import GridPattern, Shown, gaps


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
