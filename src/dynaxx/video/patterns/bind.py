# SPDX-License-Identifier: Apache-2.0
"""`on_grid`: bind any rule to a grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynaxx.patterns.base import Combined
from dynaxx.selection import Hybrid, Selector
from dynaxx.video.grid import Grid
from dynaxx.video.patterns.base import GridPattern
from dynaxx.video.patterns.first import FirstFrames


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
