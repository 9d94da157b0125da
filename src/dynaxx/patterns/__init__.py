"""Position-only rules. Each has a closed-form layout; `|` and `&` combine them."""

from dynaxx.patterns.base import Intersection, Pattern, Union
from dynaxx.patterns.fixed import (
    Documents,
    GlobalTokens,
    LastQueries,
    LocalBlocks,
    RandomBlocks,
    Sink,
    bigbird,
    longformer,
    streaming,
)
from dynaxx.patterns.local import Causal, Dilated, Full, SlidingWindow, Strided

__all__ = [
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "GlobalTokens",
    "Intersection",
    "LastQueries",
    "LocalBlocks",
    "Pattern",
    "RandomBlocks",
    "Sink",
    "SlidingWindow",
    "Strided",
    "Union",
    "bigbird",
    "longformer",
    "streaming",
]
