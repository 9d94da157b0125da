# SPDX-License-Identifier: Apache-2.0
"""Rules over positions. Each has a layout in closed form; `|` and `&` combine them.

A file of this folder that defines a pattern with a kind exports it; the lines below are for type checkers.
"""

from dynaxx.patterns.base import Causal, Intersection, Pattern, Union
from dynaxx.patterns.content import GlobalContent, content_tokens
from dynaxx.patterns.documents import Documents
from dynaxx.patterns.global_tokens import GlobalTokens, Sink
from dynaxx.patterns.last_queries import LastQueries
from dynaxx.patterns.local import Dilated, Full, SlidingWindow, Strided
from dynaxx.patterns.presets import bigbird, longformer, streaming
from dynaxx.patterns.whole_blocks import LocalBlocks, RandomBlocks
from dynaxx.settings import import_folder

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

vars().update(import_folder(__name__, Pattern))
