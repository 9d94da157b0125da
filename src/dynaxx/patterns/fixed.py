"""Rules on where a token stands: global tokens, sinks, documents, random blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, as_integer
from dynaxx.patterns.base import Pattern, Visited
from dynaxx.patterns.kinds import Blocks, Kinds, distinct, met, packed, whole_or_nothing
from dynaxx.patterns.local import SlidingWindow
from dynaxx.patterns.program import FAR, Op, positions
from dynaxx.patterns.runs import Ints, Runs


@typed
@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Tokens that every query sees (Longformer, BigBird).

    Args:
        tokens: the first n positions, or a tuple of positions.
        symmetric: the global tokens see every key, too.
    """

    tokens: int | tuple[int, ...]
    symmetric: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Iterable) or getattr(self.tokens, "ndim", 1) == 0:
            count = as_integer("tokens", self.tokens)
            if count < 0:
                raise ValueError(f"`tokens` must be >= 0, got {count}")
            object.__setattr__(self, "tokens", count)
            return
        positions = tuple(sorted({as_integer("tokens", position) for position in self.tokens}))
        if positions and positions[0] < 0:
            raise ValueError(f"`tokens` must be positions >= 0, got {positions[0]}")
        object.__setattr__(self, "tokens", positions)

    def _is_global(self, positions: Tensor) -> Tensor:
        if isinstance(self.tokens, int):
            return (positions >= 0) & (positions < self.tokens)
        return torch.isin(positions, torch.tensor(self.tokens, dtype=positions.dtype))

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self._is_global(k_pos) & torch.ones_like(q_pos, dtype=torch.bool)
        return seen | self._is_global(q_pos) if self.symmetric else seen

    def visited(self, grid: BlockGrid) -> Visited:
        q_block, kv_block = grid.block_size
        cols, _ = _held(self.tokens, kv_block, grid.kv_blocks, 0)
        touched, filled = _runs_of(cols > 0), _runs_of(cols == 1)
        if not self.symmetric:
            return Visited(touched, filled)
        rows, _ = _held(self.tokens, q_block, grid.q_blocks, grid.offset)
        return Visited(_and_whole(touched, rows > 0, grid.kv_blocks), _and_whole(filled, rows == 1, grid.kv_blocks))

    def kinds(self, blocks: Blocks) -> Kinds:
        grid, (q_block, kv_block) = blocks.grid, blocks.grid.block_size
        kind, shown = _held(self.tokens, kv_block, grid.kv_blocks, 0)
        by_col = Kinds(kind.take(blocks.cols), packed(shown)[:, None])
        if not self.symmetric:
            return by_col
        kind, shown = _held(self.tokens, q_block, grid.q_blocks, grid.offset)
        by_row = Kinds(kind.take(blocks.rows), -shown.astype(np.int32)[:, :, None])
        kind, (cols, rows) = met([by_col, by_row])
        return Kinds(kind, cols | rows)

    def program(self, grid: BlockGrid) -> list[int]:
        runs = [(0, self.tokens)] if isinstance(self.tokens, int) else [(token, token + 1) for token in self.tokens]
        keys = positions(Op.KEYS, runs)
        return [*keys, Op.QUERIES, *keys[1:], Op.ANY, 2] if self.symmetric else keys


@typed
class Sink(GlobalTokens):
    """The first `tokens` keys, which language models use as attention sinks (StreamingLLM)."""

    def __init__(self, tokens: int = 4) -> None:
        super().__init__(tokens)

    def __repr__(self) -> str:
        return f"Sink({self.tokens})"


@typed
@dataclass(frozen=True)
class LastQueries(Pattern):
    """The last `queries` queries see every key: in a prompt they are the question, and its answer may stand anywhere.

    They cost about 2 * queries / seqlen of a causal layout's blocks.
    """

    queries: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", as_integer("queries", self.queries))
        if self.queries < 0:
            raise ValueError(f"`queries` must be >= 0, got {self.queries}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos >= grid.seqlen_k - self.queries) & torch.ones_like(k_pos, dtype=torch.bool)

    def visited(self, grid: BlockGrid) -> Visited:
        if not self.queries:
            return Visited(Runs.none(), Runs.none())
        first, _ = grid.spans()
        since = grid.seqlen_k - self.queries  # the first of them
        whole = lambda some: Runs.one(np.zeros_like(first), some * grid.kv_blocks)
        return Visited(whole(first + grid.block_size[0] > since), whole(first >= since))

    def kinds(self, blocks: Blocks) -> Kinds:
        q_block = blocks.grid.block_size[0]
        hidden = blocks.grid.seqlen_k - self.queries - (blocks.rows * q_block + blocks.grid.offset)
        found, kind = distinct(np.minimum(np.maximum(hidden, 0), q_block), q_block + 1)
        return Kinds(kind, -(np.arange(q_block) >= found[:, None]).astype(np.int32)[:, :, None])

    def program(self, grid: BlockGrid) -> list[int]:
        return positions(Op.QUERIES, [(grid.seqlen_k - self.queries, FAR)] if self.queries else [])


@typed
@dataclass(frozen=True)
class Documents(Pattern):
    """Pairs within one document of a packed sequence.

    Args:
        cu_seqlens: cumulative lengths (0, ..., total) of the documents in key positions, host integers.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.cu_seqlens.tolist() if isinstance(self.cu_seqlens, Tensor) else self.cu_seqlens
        ends = tuple(as_integer("cu_seqlens", end) for end in given)
        if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
            raise ValueError(f"`cu_seqlens` must start at 0 and not fall, got {ends[:8]}")
        object.__setattr__(self, "cu_seqlens", ends)

    def _document(self, positions: Ints) -> Ints:
        """Index of each position's document; positions past the end count to the last one."""
        return np.searchsorted(np.array(self.cu_seqlens[1:-1], np.int64), positions, side="right")

    def _check(self, grid: BlockGrid) -> None:
        if self.cu_seqlens[-1] != grid.seqlen_k:
            raise ValueError(f"`cu_seqlens` must end at seqlen_k = {grid.seqlen_k}, got {self.cu_seqlens[-1]}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        q_document, k_document = (torch.from_numpy(self._document(pos.numpy())) for pos in (q_pos, k_pos))
        return q_document == k_document

    def visited(self, grid: BlockGrid) -> Visited:
        self._check(grid)
        q_block, kv_block = grid.block_size
        bounds = np.array(self.cu_seqlens)
        first, last = grid.spans()
        document, last_document = self._document(first), self._document(last)
        end = last if grid.causal else bounds[last_document + 1] - 1
        end = np.minimum(end, grid.seqlen_k - 1) // kv_block + 1
        touched = Runs.one(bounds[document] // kv_block, end)
        alone = document == self._document(first + q_block - 1)
        full_start = (bounds[document] + kv_block - 1) // kv_block
        bounds[-1] = grid.kv_blocks * kv_block  # what lies past the end counts to the last document
        full = Runs.one(full_start, np.where(alone, bounds[document + 1] // kv_block, 0))
        return Visited(touched, full.within(touched))

    def kinds(self, blocks: Blocks) -> Kinds:
        grid, (q_block, kv_block) = blocks.grid, blocks.grid.block_size
        self._check(grid)
        row_kind, q_documents = self._within(q_block, grid.q_blocks, grid.offset)
        col_kind, k_documents = self._within(kv_block, grid.kv_blocks, 0)
        q_first = self._document(np.arange(grid.q_blocks) * q_block + grid.offset)
        k_first = self._document(np.arange(grid.kv_blocks) * kv_block)
        apart = np.minimum(np.maximum(q_first[blocks.rows] - k_first[blocks.cols], -q_block), kv_block)
        spread = q_block + kv_block + 1
        kind = (row_kind[blocks.rows] * len(k_documents) + col_kind[blocks.cols]) * spread + apart + q_block
        found, kind = distinct(kind, len(q_documents) * len(k_documents) * spread)
        pair, apart = found // spread, found % spread - q_block
        q_documents, k_documents = q_documents[pair // len(k_documents)], k_documents[pair % len(k_documents)]
        return Kinds(kind, packed((q_documents + apart[:, None])[:, :, None] == k_documents[:, None, :]))

    def program(self, grid: BlockGrid) -> list[int]:
        self._check(grid)
        return [Op.DOCUMENTS, len(self.cu_seqlens), *self.cu_seqlens]

    def _within(self, size: int, count: int, offset: int) -> tuple[Ints, Ints]:
        """Kinds of `count` blocks of `size` tokens, the first at `offset`, and of each kind the tokens' documents,
        counted from its first. Kind 0 has but one."""
        starts = np.array(self.cu_seqlens[1:-1], np.int64) - offset
        starts = starts[(starts > 0) & (starts < count * size) & (starts % size > 0)]
        cut, which = np.unique(starts // size, return_inverse=True)
        kind = np.zeros(count, np.int64)
        kind[cut] = np.arange(1, len(cut) + 1)
        begins = np.zeros((len(cut) + 1, size), np.int64)
        np.add.at(begins, (which + 1, starts % size), 1)
        return kind, begins.cumsum(1)


@typed
@dataclass(frozen=True)
class LocalBlocks(Pattern):
    """A window of whole blocks: the kv block in which a q block ends, and those before it, `blocks` in all.

    It costs as many blocks as a sliding window of (blocks - 1) * kv_block + 1 tokens and shows more of them.
    """

    blocks: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_integer("blocks", self.blocks))
        if self.blocks < 1:
            raise ValueError(f"`blocks` must be >= 1, got {self.blocks}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        q_block, kv_block = grid.block_size
        row = (q_pos - grid.offset) // q_block
        last = ((row + 1) * q_block - 1 + grid.offset) // kv_block
        return (k_pos // kv_block <= last) & (k_pos // kv_block > last - self.blocks)

    def _reach(self, grid: BlockGrid) -> tuple[Ints, Ints]:
        """First and last kv block of each row, unclipped."""
        last = (grid.spans()[0] + grid.block_size[0] - 1) // grid.block_size[1]
        return last - self.blocks + 1, last

    def visited(self, grid: BlockGrid) -> Visited:
        first, last = self._reach(grid)
        runs = Runs.one(np.maximum(first, 0), np.minimum(last + 1, grid.kv_blocks))
        return Visited(runs, runs)

    def kinds(self, blocks: Blocks) -> Kinds:
        first, last = (x.take(blocks.rows) for x in self._reach(blocks.grid))
        return whole_or_nothing((blocks.cols >= first) & (blocks.cols <= last))

    def program(self, grid: BlockGrid) -> list[int]:
        return [Op.LOCAL_BLOCKS, min(self.blocks, FAR)]


@typed
@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """`blocks` random kv blocks per q block (BigBird), one from each of as many equal shares of the visible ones.

    Drawn by a counter-based hash of (seed, row, share): the same on every device and machine, and no state.
    """

    blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_integer("blocks", self.blocks))
        object.__setattr__(self, "seed", as_integer("seed", self.seed))
        if self.blocks < 0:
            raise ValueError(f"`blocks` must be >= 0, got {self.blocks}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        rows = ((q_pos - grid.offset) // grid.block_size[0]).clamp(0, grid.q_blocks - 1)
        return torch.from_numpy(self._holds(grid, rows.numpy(), (k_pos // grid.block_size[1]).numpy()))

    def visited(self, grid: BlockGrid) -> Visited:
        cols = _drawn(self, grid).T
        start = np.maximum(cols, 0)
        runs = Runs(start, start + (cols >= 0))
        return Visited(runs, runs)

    def kinds(self, blocks: Blocks) -> Kinds:
        return whole_or_nothing(self._holds(blocks.grid, blocks.rows, blocks.cols))

    def program(self, grid: BlockGrid) -> list[int]:
        return [Op.RANDOM_BLOCKS, min(self.blocks, FAR), _hash_start(self.seed)]

    def _holds(self, grid: BlockGrid, rows: Ints, cols: Ints) -> NDArray[np.bool_]:
        """Whether a row drew a block; of any shapes that fit each other."""
        found = np.zeros(np.broadcast_shapes(rows.shape, cols.shape), np.bool_)
        for drawn in _drawn(self, grid).T:
            found |= drawn.take(rows) == cols
        return found


@lru_cache(maxsize=8)
def _drawn(rule: RandomBlocks, grid: BlockGrid) -> Ints:
    """(q_blocks, blocks) kv blocks of each row; one that sees no more than `blocks` of them gets them all, else -1."""
    slot = np.arange(rule.blocks)
    _, last = grid.spans()
    available = last // grid.block_size[1] + 1 if grid.causal else np.full_like(last, grid.kv_blocks)
    available = np.minimum(np.maximum(available, 0), grid.kv_blocks)[:, None]
    low, high = slot * available // max(1, rule.blocks), (slot + 1) * available // max(1, rule.blocks)
    col = low + _hash(rule.seed, np.arange(grid.q_blocks)[:, None], slot) % np.maximum(high - low, 1)
    return np.where(high > low, col, -1)


@lru_cache(maxsize=8)
def _held(tokens: int | tuple[int, ...], size: int, count: int, offset: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The kinds of `count` blocks of `size` tokens, the first at `offset`, and which tokens of each are global.

    Kind 0 has no global token, kind 1 only such, each other block that has some is a kind of its own.
    """
    at = (np.arange(tokens) if isinstance(tokens, int) else np.array(tokens, np.int64)) - offset
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
    """The runs that all rows have, and every block of some rows."""
    if not rows.any():
        return runs
    start, end = np.zeros((2, max(1, len(runs.start)), len(rows)), np.int64)
    start[: len(runs.start)], end[: len(runs.start)] = runs
    start[0, rows] = 0
    start[1:, rows] = end[:, rows] = kv_blocks
    return Runs(start, end)


def _runs_of(held: NDArray[np.bool_]) -> Runs:
    """The runs of True in (count,) bool, the same for every row."""
    padded = np.zeros(len(held) + 2, np.bool_)
    padded[1:-1] = held
    edges = (padded[1:] != padded[:-1]).nonzero()[0]
    return Runs(edges[::2, None], edges[1::2, None])


def _hash(seed: int, rows: Ints, slot: Ints) -> Ints:
    """A well-mixed 31-bit integer per (row, slot): three rounds of multiply and xor-shift in wrapping int64."""
    x = rows * 0x9E3779B1 + slot * 0x85EBCA77 + _hash_start(seed)
    for _ in range(3):
        x = (x ^ (x >> 29)) * 0x1B873593CC9E2D51
    return (x >> 32) & 0x7FFFFFFF


def _hash_start(seed: int) -> int:
    return (seed * 0xC2B2AE3D + 0x27D4EB2F + 2**63) % 2**64 - 2**63


@typed
def longformer(window: int | tuple[int, int], global_tokens: int | tuple[int, ...] = 1) -> Pattern:
    """Longformer: a window and symmetric global tokens (arXiv 2004.05150).

    Args:
        window: as `SlidingWindow`; an encoder with `attention_window` w has (w // 2, w // 2).
        global_tokens: how many from the first on, or their positions; they see every key, and every query sees them.
    """
    return SlidingWindow(window) | GlobalTokens(global_tokens, symmetric=True)


@typed
def bigbird(
    window: int | tuple[int, int], global_tokens: int | tuple[int, ...], random_blocks: int, seed: int = 0
) -> Pattern:
    """BigBird: a window, symmetric global tokens and random blocks (arXiv 2007.14062).

    Args:
        window, global_tokens: as `longformer`.
        random_blocks: per q block, drawn from `seed`.
    """
    return SlidingWindow(window) | GlobalTokens(global_tokens, symmetric=True) | RandomBlocks(random_blocks, seed)


@typed
def streaming(window: int, sinks: int = 4) -> Pattern:
    """StreamingLLM: the first `sinks` tokens and the last `window` up to the query's own (arXiv 2309.17453)."""
    return Sink(sinks) | SlidingWindow(window)
