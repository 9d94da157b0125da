# SPDX-License-Identifier: Apache-2.0
"""Patterns over the positions of a grid; a file that is added here is found by itself."""

from dynaxx.settings import import_folder
from dynaxx.video.patterns.window import FirstFrames, GridPattern, GridWindow, RadialDecay, on_grid

__all__ = ["FirstFrames", "GridPattern", "GridWindow", "RadialDecay", "on_grid"]

vars().update(import_folder(__name__, GridPattern))
