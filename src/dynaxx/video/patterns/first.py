# SPDX-License-Identifier: Apache-2.0
"""The pattern of the first frames, which every token sees and which see every token."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from dynaxx.settings import Count
from dynaxx.video.grid import Boxes
from dynaxx.video.patterns.base import GridPattern, Shown


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
