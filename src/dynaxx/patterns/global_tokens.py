# SPDX-License-Identifier: Apache-2.0
"""Patterns of tokens that every query sees: global tokens and attention sinks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import as_integer, typed
from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, met, packed
from dynaxx.patterns.program import FAR, Op, positions
from dynaxx.patterns.runs import Ints, Runs, Visited
from dynaxx.settings import Count, Range


@typed
@dataclass(frozen=True)
class GlobalTokens(Pattern, kind="global_tokens"):
    """The first `tokens` keys, or those at the given positions (Longformer, BigBird).

    Args:
        tokens: the first n positions, or a tuple of positions.
        symmetric: whether the global tokens also see every key.
    """

    tokens: Count | tuple[Count, ...]
    symmetric: bool = False

    def __post_init__(self) -> None:
        """Convert the tokens to a number or a sorted tuple, and check them."""
        if isinstance(self.tokens, Iterable) and getattr(self.tokens, "ndim", 1) != 0:
            positions = tuple(sorted({as_integer("tokens", position) for position in self.tokens}))
            object.__setattr__(self, "tokens", positions)
        super().__post_init__()

    @override
    @classmethod
    def random(cls, rng: random.Random, seqlen_k: int) -> Self:
        rule = super().random(rng, seqlen_k)
        positions = tuple(rng.sample(range(seqlen_k), min(seqlen_k, 3)))
        return replace(rule, tokens=positions) if type(rule) is GlobalTokens and rng.random() < 0.5 else rule

    def _is_global(self, pos: Tensor) -> Tensor:
        if isinstance(self.tokens, int):
            return (pos >= 0) & (pos < min(self.tokens, FAR))
        near = [token for token in self.tokens if token < FAR]
        return torch.isin(pos, torch.tensor(near, dtype=pos.dtype, device="cpu"))

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self._is_global(k_pos) & torch.ones_like(q_pos, dtype=torch.bool)
        return seen | self._is_global(q_pos) if self.symmetric else seen

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        q_block, kv_block = grid.block_size
        cols, _ = blocks_holding(self.tokens, kv_block, grid.kv_blocks, 0)
        touched, filled = _runs_of(cols > 0), _runs_of(cols == 1)
        if not self.symmetric:
            return Visited(touched, filled)
        rows, _ = blocks_holding(self.tokens, q_block, grid.q_blocks, grid.offset)
        return Visited(_and_whole(touched, rows > 0, grid.kv_blocks), _and_whole(filled, rows == 1, grid.kv_blocks))

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        grid, (q_block, kv_block) = blocks.grid, blocks.grid.block_size
        kind, shown = blocks_holding(self.tokens, kv_block, grid.kv_blocks, 0)
        by_col = Kinds(kind.take(blocks.cols), packed(shown)[:, None])
        if not self.symmetric:
            return by_col
        kind, shown = blocks_holding(self.tokens, q_block, grid.q_blocks, grid.offset)
        by_row = Kinds(kind.take(blocks.rows), -shown.astype(np.int32)[:, :, None])
        kind, (cols, rows) = met([by_col, by_row])
        return Kinds(kind, cols | rows)

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        runs = [(0, self.tokens)] if isinstance(self.tokens, int) else [(token, token + 1) for token in self.tokens]
        keys = positions(Op.KEYS, runs)
        return [*keys, Op.QUERIES, *keys[1:], Op.ANY, 2] if self.symmetric else keys


@dataclass(frozen=True)
class Sink(GlobalTokens, kind="sink"):
    """The first `tokens` keys, which language models use as attention sinks (StreamingLLM)."""

    tokens: Annotated[int, Range(0, tries=(0, 1, 3, 5))] = 4
    symmetric: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"Sink({self.tokens})"


@lru_cache(maxsize=8)
def blocks_holding(tokens: int | tuple[int, ...], size: int, count: int, offset: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the kinds of `count` blocks of `size` tokens, the first at `offset`, and the global tokens of each kind.

    Blocks of kind 0 have no global token, and those of kind 1 only global tokens. Every other block has its own kind.
    """
    end = offset + count * size
    if isinstance(tokens, int):
        at = np.arange(max(0, min(tokens, end))) - offset
    else:
        at = np.array([token for token in tokens if token < end], np.int64) - offset
    at = at[(at >= 0) & (at < count * size)]
    block = at // size
    held = np.bincount(block, minlength=count)
    kind = (held == size).astype(np.int64)
    cut = ((held > 0) & (held < size)).nonzero()[0]
    kind[cut] = np.arange(2, len(cut) + 2)
    shown = np.zeros((len(cut) + 2, size), np.bool_)
    shown[1] = True
    shown[kind[block], at % size] = True
    return kind, shown


def _and_whole(runs: Runs, rows: NDArray[np.bool_], kv_blocks: int) -> Runs:
    """Return the given runs for all rows, extended to every block in the given rows."""
    if not rows.any():
        return runs
    start, end = np.zeros((2, max(1, len(runs.start)), len(rows)), np.int64)
    start[: len(runs.start)], end[: len(runs.start)] = runs
    start[0, rows] = 0
    start[1:, rows] = end[:, rows] = kv_blocks
    return Runs(start, end)


def _runs_of(held: NDArray[np.bool_]) -> Runs:
    """Return the runs of True in a (count,) bool array, the same for every row."""
    padded = np.zeros(len(held) + 2, np.bool_)
    padded[1:-1] = held
    edges = (padded[1:] != padded[:-1]).nonzero()[0]
    return Runs(edges[::2, None], edges[1::2, None])
