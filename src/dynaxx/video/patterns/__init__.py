# SPDX-License-Identifier: Apache-2.0
"""Patterns over the positions of a grid, one per file.

The files:

    base, bind             what they share, and `on_grid`, which binds any rule to a grid
    window, radial, first  the patterns
"""

from dynaxx.settings import import_folder
from dynaxx.video.patterns.base import GridPattern
from dynaxx.video.patterns.bind import on_grid
from dynaxx.video.patterns.first import FirstFrames
from dynaxx.video.patterns.radial import RadialDecay
from dynaxx.video.patterns.window import GridWindow

__all__ = ["FirstFrames", "GridPattern", "GridWindow", "RadialDecay", "on_grid"]

vars().update(import_folder(__name__, GridPattern))
