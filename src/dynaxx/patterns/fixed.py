"""Rules on where a token stands: global tokens, sinks, documents, random blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.layout.host import on_host
from dynaxx.patterns.base import BlockStates, Pattern, Visited
from dynaxx.patterns.local import SlidingWindow
from dynaxx.patterns.runs import Runs, any_of


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
        if isinstance(self.tokens, int):
            if self.tokens < 0:
                raise ValueError(f"`tokens` must be >= 0, got {self.tokens}")
            return
        positions = tuple(sorted({int(position) for position in self.tokens}))
        if positions and positions[0] < 0:
            raise ValueError(f"`tokens` must be positions >= 0, got {positions[0]}")
        object.__setattr__(self, "tokens", positions)

    def _is_global(self, positions: Tensor) -> Tensor:
        if isinstance(self.tokens, int):
            return (positions >= 0) & (positions < self.tokens)
        return torch.isin(positions, torch.tensor(self.tokens, dtype=positions.dtype))

    def _count_before(self, positions: Tensor) -> Tensor:
        """How many global tokens stand before each position."""
        if isinstance(self.tokens, int):
            return positions.clamp(0, self.tokens)
        return torch.searchsorted(torch.tensor(self.tokens, dtype=torch.int64), positions)

    def _blocks(self, size: int, count: int, offset: int) -> tuple[Tensor, Tensor]:
        """(count,) whether each block of `size` tokens, the first at `offset`, holds a global token, and only such."""
        starts = torch.arange(count) * size + offset
        held = self._count_before(starts + size) - self._count_before(starts)
        return held > 0, held == size

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self._is_global(k_pos) & torch.ones_like(q_pos, dtype=torch.bool)
        return seen | self._is_global(q_pos) if self.symmetric else seen

    def visited(self, grid: BlockGrid) -> Visited:
        q_block, kv_block = grid.block_size
        found = self._blocks(kv_block, grid.kv_blocks, 0)
        touched, filled = (_runs_of(cols) for cols in found)
        if not self.symmetric:
            return Visited(touched, filled)
        rows = self._blocks(q_block, grid.q_blocks, grid.offset)
        whole = lambda some: Runs.one(torch.zeros(len(some), dtype=torch.int64), some * grid.kv_blocks)
        return Visited(any_of([touched, whole(rows[0])]), any_of([filled, whole(rows[1])]))

    def _side(self, start: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Whether the tokens start .. start + size - 1 are all, or some, global; and then a key of which, else 0."""
        count = self._count_before(start + size) - self._count_before(start)
        some = (count > 0) & (count < size)
        return count == size, some, torch.where(some, start + size, 0)

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        q_block, kv_block = grid.block_size
        full, partial, key = self._side(cols * kv_block, kv_block)
        if self.symmetric:
            q_full, q_partial, q_key = self._side(rows * q_block + grid.offset, q_block)
            key = torch.stack([key, q_key])
            full, partial = full | q_full, partial | q_partial
        return BlockStates(full, partial & ~full, key)


class Sink(GlobalTokens):
    """The first `tokens` keys, which language models use as attention sinks (StreamingLLM)."""

    def __init__(self, tokens: int = 4) -> None:
        super().__init__(tokens)

    def __repr__(self) -> str:
        return f"Sink({self.tokens})"


@dataclass(frozen=True)
class LastQueries(Pattern):
    """The last `queries` queries see every key: in a prompt they are the question, and its answer may stand anywhere.

    They cost about 2 * queries / seqlen of a causal layout's blocks.
    """

    queries: int

    def __post_init__(self) -> None:
        if self.queries < 0:
            raise ValueError(f"`queries` must be >= 0, got {self.queries}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos >= grid.seqlen_k - self.queries) & torch.ones_like(k_pos, dtype=torch.bool)

    def visited(self, grid: BlockGrid) -> Visited:
        since = grid.seqlen_q - self.queries  # the first of them
        first = grid.rows() * grid.block_size[0]
        whole = lambda some: Runs.one(torch.zeros_like(first), some * grid.kv_blocks)
        if not self.queries:
            return Visited(Runs.none(), Runs.none())
        return Visited(whole(first + grid.block_size[0] > since), whole(first >= since))

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        first = rows * grid.block_size[0] + grid.offset
        since = grid.seqlen_k - self.queries
        full, touched = first >= since, first + grid.block_size[0] - 1 >= since
        return BlockStates(full, touched & ~full, since - first)


@dataclass(frozen=True)
class Documents(Pattern):
    """Pairs within one document of a packed sequence.

    Args:
        cu_seqlens: cumulative lengths (0, ..., total) of the documents in key positions, host integers.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        ends = self.cu_seqlens.tolist() if isinstance(self.cu_seqlens, Tensor) else list(self.cu_seqlens)
        if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
            raise ValueError(f"`cu_seqlens` must start at 0 and not fall, got {ends[:8]}")
        object.__setattr__(self, "cu_seqlens", tuple(int(end) for end in ends))

    def _document(self, positions: Tensor) -> Tensor:
        """Index of each position's document; positions past the end count to the last one."""
        return torch.searchsorted(torch.tensor(self.cu_seqlens[1:-1]), positions.contiguous(), right=True)

    def _check(self, grid: BlockGrid) -> None:
        if self.cu_seqlens[-1] != grid.seqlen_k:
            raise ValueError(f"`cu_seqlens` must end at seqlen_k = {grid.seqlen_k}, got {self.cu_seqlens[-1]}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self._document(q_pos) == self._document(k_pos)

    def visited(self, grid: BlockGrid) -> Visited:
        self._check(grid)
        q_block, kv_block = grid.block_size
        bounds = torch.tensor(self.cu_seqlens)
        first, last = grid.spans()
        document, last_document = self._document(first), self._document(last)
        end = last if grid.causal else bounds[last_document + 1] - 1
        end = torch.div(end.clamp(max=grid.seqlen_k - 1), kv_block, rounding_mode="floor") + 1
        touched = Runs.one(bounds[document] // kv_block, end)
        alone = document == self._document(first + q_block - 1)
        full_start = (bounds[document] + kv_block - 1) // kv_block
        bounds[-1] = grid.kv_blocks * kv_block  # what lies past the end counts to the last document
        full = Runs.one(full_start, torch.where(alone, bounds[document + 1] // kv_block, 0))
        return Visited(touched, full.within(touched))

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        self._check(grid)
        q_start, k_start = (
            rows * grid.block_size[0] + grid.offset,
            cols * grid.block_size[1],
        )  # whole blocks, as masks are
        q_first, q_last = self._document(q_start), self._document(q_start + grid.block_size[0] - 1)
        k_first, k_last = self._document(k_start), self._document(k_start + grid.block_size[1] - 1)
        full = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        touched = (k_last >= q_first) & (k_first <= q_last)
        return BlockStates(full, touched & ~full, torch.stack([q_start, k_start]))


@dataclass(frozen=True)
class LocalBlocks(Pattern):
    """A window of whole blocks: the kv block in which a q block ends, and those before it, `blocks` in all.

    It costs as many blocks as a sliding window of (blocks - 1) * kv_block + 1 tokens and shows more of them.
    """

    blocks: int

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"`blocks` must be >= 1, got {self.blocks}")

    def _reach(self, grid: BlockGrid, rows: Tensor) -> tuple[Tensor, Tensor]:
        """First and last kv block of each row, unclipped."""
        end = rows * grid.block_size[0] + grid.block_size[0] - 1 + grid.offset
        last = torch.div(end, grid.block_size[1], rounding_mode="floor")
        return last - self.blocks + 1, last

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        first, last = self._reach(grid, torch.div(q_pos - grid.offset, grid.block_size[0], rounding_mode="floor"))
        col = k_pos // grid.block_size[1]
        return (col >= first) & (col <= last)

    def visited(self, grid: BlockGrid) -> Visited:
        first, last = self._reach(grid, grid.rows())
        runs = Runs.one(first.clamp(min=0), (last + 1).clamp(max=grid.kv_blocks))
        return Visited(runs, runs)

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        first, last = self._reach(grid, rows)
        full = (cols >= first) & (cols <= last)
        return BlockStates(full, torch.zeros_like(full), torch.zeros_like(rows))


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """`blocks` random kv blocks per q block (BigBird), one from each of as many equal shares of the visible ones.

    Drawn by a counter-based hash of (seed, row, share): the same on every device and machine, and no state.
    """

    blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise ValueError(f"`blocks` must be >= 0, got {self.blocks}")

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        rows = torch.div(q_pos - grid.offset, grid.block_size[0], rounding_mode="floor").clamp(0, grid.q_blocks - 1)
        return self._holds(grid, rows, k_pos // grid.block_size[1])

    def visited(self, grid: BlockGrid) -> Visited:
        cols = _drawn(self, grid)
        start = cols.clamp(min=0)
        runs = Runs(start, torch.where(cols >= 0, cols + 1, start))
        return Visited(runs, runs)

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        full = self._holds(grid, rows, cols)
        return BlockStates(full, torch.zeros_like(full), torch.zeros_like(rows))

    def _holds(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> Tensor:
        """Whether a row drew a block; of any shapes that fit each other."""
        found = torch.zeros(torch.broadcast_shapes(rows.shape, cols.shape), dtype=torch.bool)
        for drawn in _drawn(self, grid).T:
            found |= drawn[rows] == cols
        return found


@lru_cache(maxsize=8)
@on_host
def _drawn(rule: RandomBlocks, grid: BlockGrid) -> Tensor:
    """(q_blocks, blocks) kv blocks of each row; one that sees no more than `blocks` of them gets them all, else -1."""
    slot = torch.arange(rule.blocks)
    available = grid.causal_kv_blocks(grid.rows())[:, None]
    low, high = slot * available // max(1, rule.blocks), (slot + 1) * available // max(1, rule.blocks)
    col = low + _hash(rule.seed, grid.rows()[:, None], slot) % (high - low).clamp(min=1)
    return torch.where(high > low, col, -1)


def _runs_of(held: Tensor) -> Runs:
    """The runs of True in (count,) bool, the same for every row."""
    edges = torch.nn.functional.pad(held.to(torch.int8), (1, 1)).diff()
    return Runs((edges > 0).nonzero().view(1, -1), (edges < 0).nonzero().view(1, -1))


def _hash(seed: int, rows: Tensor, slot: Tensor) -> Tensor:
    """A well-mixed 31-bit integer per (row, slot): three rounds of multiply and xor-shift in wrapping int64."""
    x = rows * 0x9E3779B1 + slot * 0x85EBCA77 + seed * 0xC2B2AE3D + 0x27D4EB2F
    for _ in range(3):
        x = (x ^ (x >> 29)) * 0x1B873593CC9E2D51
    return (x >> 32) & 0x7FFFFFFF


def longformer(window: int | tuple[int, int], global_tokens: int | tuple[int, ...] = 1) -> Pattern:
    """Longformer: a window and symmetric global tokens (arXiv 2004.05150).

    Args:
        window: as `SlidingWindow`; an encoder with `attention_window` w has (w // 2, w // 2).
        global_tokens: how many from the first on, or their positions; they see every key, and every query sees them.
    """
    return SlidingWindow(window) | GlobalTokens(global_tokens, symmetric=True)


def bigbird(
    window: int | tuple[int, int], global_tokens: int | tuple[int, ...], random_blocks: int, seed: int = 0
) -> Pattern:
    """BigBird: a window, symmetric global tokens and random blocks (arXiv 2007.14062).

    Args:
        window, global_tokens: as `longformer`.
        random_blocks: per q block, drawn from `seed`.
    """
    return SlidingWindow(window) | GlobalTokens(global_tokens, symmetric=True) | RandomBlocks(random_blocks, seed)


def streaming(window: int, sinks: int = 4) -> Pattern:
    """StreamingLLM: the first `sinks` tokens and the last `window` up to the query's own (arXiv 2309.17453)."""
    return Sink(sinks) | SlidingWindow(window)
