"""Position-only rules. Each has a closed-form layout; `|` and `&` combine them."""

from dynaxx.patterns.base import Intersection, Pattern, Union
from dynaxx.patterns.content import GlobalContent, content_tokens
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
    "GlobalContent",
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
    "content_tokens",
    "longformer",
    "streaming",
]
