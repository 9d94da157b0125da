# SPDX-License-Identifier: Apache-2.0
"""`Rule`: what building a layout asks of a pattern."""

from __future__ import annotations

from typing import Protocol

from dynaxx.layout import BlockGrid
from dynaxx.patterns.kinds import Blocks, Kinds
from dynaxx.patterns.runs import Visited


class Rule(Protocol):
    """A pattern; `Pattern` documents the methods."""

    @property
    def by_distance(self) -> bool:
        """Return whether the visibility of a pair depends only on the distance from key to query."""

    def within_causality(self, grid: BlockGrid) -> Rule:
        """Return this rule without the pairs that a causal grid hides."""

    def program(self, grid: BlockGrid) -> list[int] | None:
        """Return this rule as numbers for the compiled core."""

    def visited(self, grid: BlockGrid) -> Visited:
        """Return runs of blocks that hold every visible pair."""

    def kinds(self, blocks: Blocks) -> Kinds:
        """Return the element masks of some blocks."""
