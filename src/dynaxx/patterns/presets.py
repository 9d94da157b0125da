# SPDX-License-Identifier: Apache-2.0
"""Patterns of well-known models: Longformer, BigBird, StreamingLLM."""

from __future__ import annotations

from dynaxx.arguments import typed
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.global_tokens import GlobalTokens, Sink
from dynaxx.patterns.local import SlidingWindow
from dynaxx.patterns.whole_blocks import RandomBlocks


@typed
def longformer(window: int | tuple[int, int], global_tokens: int | tuple[int, ...] = 1) -> Pattern:
    """Return Longformer's pattern: a window and symmetric global tokens (arXiv 2004.05150).

    Args:
        window: as in `SlidingWindow`; an encoder with `attention_window` w has (w // 2, w // 2).
        global_tokens: the number of first tokens that are global, or positions. Global tokens see every key, and every
            query sees them.
    """
    return SlidingWindow(window) | GlobalTokens(global_tokens, symmetric=True)


@typed
def bigbird(
    window: int | tuple[int, int], global_tokens: int | tuple[int, ...], random_blocks: int, seed: int = 0
) -> Pattern:
    """Return BigBird's pattern: a window, symmetric global tokens and random blocks (arXiv 2007.14062).

    Args:
        window: as in `SlidingWindow`.
        global_tokens: as in `longformer`.
        random_blocks: number of random kv blocks per q block.
        seed: seed of the random blocks.
    """
    return SlidingWindow(window) | GlobalTokens(global_tokens, symmetric=True) | RandomBlocks(random_blocks, seed)


@typed
def streaming(window: int, sinks: int = 4) -> Pattern:
    """Return StreamingLLM's pattern: a window and attention sinks (arXiv 2309.17453).

    Args:
        window: number of keys including the query's own.
        sinks: number of first tokens that every query sees.
    """
    return Sink(sinks) | SlidingWindow(window)
