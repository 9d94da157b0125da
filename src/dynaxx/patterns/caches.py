# SPDX-License-Identifier: Apache-2.0
"""Clear what patterns keep between layouts."""

from __future__ import annotations

from dynaxx.layout.grid import _spans
from dynaxx.patterns.base import _cached_layout
from dynaxx.patterns.global_tokens import blocks_holding
from dynaxx.patterns.whole_blocks import drawn_blocks


def forget() -> None:
    """Drop the layouts that are kept, and what grids and rules keep for them; for measurements."""
    _cached_layout.clear()
    for cache in (_spans, drawn_blocks, blocks_holding):
        cache.cache_clear()
