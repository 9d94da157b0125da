# SPDX-License-Identifier: Apache-2.0
"""Clear the caches of patterns."""

from __future__ import annotations

from dynaxx.layout.grid import _spans
from dynaxx.patterns.base import _cached_layout
from dynaxx.patterns.global_tokens import blocks_holding
from dynaxx.patterns.whole_blocks import drawn_blocks


def forget() -> None:
    """Drop all cached layouts and the cached parts of grids and rules, so that a benchmark measures a first call."""
    _cached_layout.clear()
    for cache in (_spans, drawn_blocks, blocks_holding):
        cache.cache_clear()
