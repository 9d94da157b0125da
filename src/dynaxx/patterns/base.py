"""`Pattern`: a rule over positions, and how rules combine.

A rule says three things about a grid of blocks, all in closed form: which element pairs are visible (the definition),
which runs of blocks it touches and fills in each row, and for a given block whether it is full, partial or empty. From
these `Pattern.layout` builds a `BlockLayout` in O(visited blocks), without any object of seqlen x seqlen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.host import on_host
from dynaxx.patterns.runs import Runs, all_of, any_of


@dataclass(frozen=True)
class BlockStates:
    """What a rule says of n blocks: `full` and `partial` (n,) bool, neither means empty; `key` (n,) or (c, n) int64 is
    equal for two partial blocks only if their element masks are equal, of all grids of a block size and causality."""

    full: Tensor
    partial: Tensor
    key: Tensor

    def keys(self) -> Tensor:
        """(c, n) int64: equal for two blocks only if both are full, both are empty, or their masks are equal."""
        return torch.atleast_2d(torch.where(self.partial, self.key * 4 + 2, self.full.long()))


class Visited(NamedTuple):
    """The blocks of each row that a rule may show a pair of, and those among them that it shows whole."""

    touched: Runs
    filled: Runs


class Pattern(ABC):
    """A rule over positions. Hashable and immutable; combine with `|` (either shows the pair) and `&` (both do)."""

    def layout(
        self,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        causal: bool = True,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """Build the block layout of this rule.

        Args:
            seqlen_q: number of queries; they are aligned to the last keys.
            seqlen_k: number of keys, `seqlen_q` by default.
            causal: hide keys after the query.
            block_size: tokens per block, one of 16, 32, 64, 128, or (q_block, kv_block).

        Returns:
            A layout shared by all batch entries and heads. Layouts are cached by value. They are computed on the host
            from host integers and copied, so a GPU is never waited for.
        """
        grid = BlockGrid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, as_block_size(block_size), causal)
        return _cached_layout(self, grid, torch.device(device))

    @property
    def needs_tokens(self) -> bool:
        """Whether a part of it is known only from a request's tokens, so that it must be resolved first."""
        return False

    def hides_future(self, grid: BlockGrid) -> bool:
        """Whether, on a causal grid, it shows no key after the query anyway."""
        return False

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        """This rule for one request: parts by content (`GlobalContent`) become positions. Others stay as they are.

        Args:
            input_ids: (seqlen,) token ids of one sequence, up to its last key.
        """
        return self

    @abstractmethod
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The definition: bool, broadcast of two tensors of key positions (query `i` stands at `i + grid.offset`)."""

    @abstractmethod
    def visited(self, grid: BlockGrid) -> Visited:
        """The blocks that hold every visible pair, as runs; `filled` may leave out blocks that are full."""

    @abstractmethod
    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        """Full, partial or empty for each block (rows[n], cols[n])."""

    def __or__(self, other: object) -> Pattern:
        return Union(_flat(Union, self) + _flat(Union, other)) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: object) -> Pattern:
        return (
            Intersection(_flat(Intersection, self) + _flat(Intersection, other))
            if isinstance(other, Pattern)
            else NotImplemented
        )


def _flat(kind: type[Union] | type[Intersection], pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.parts if isinstance(pattern, kind) else (pattern,)


@dataclass(frozen=True)
class Union(Pattern):
    """A pair is visible if any part shows it."""

    parts: tuple[Pattern, ...]

    @property
    def needs_tokens(self) -> bool:
        return any(part.needs_tokens for part in self.parts)

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        return Union(tuple(part.resolve(input_ids) for part in self.parts)) if self.needs_tokens else self

    def hides_future(self, grid: BlockGrid) -> bool:
        return all(part.hides_future(grid) for part in self.parts)

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self.parts[0].visible(grid, q_pos, k_pos)
        for part in self.parts[1:]:
            seen = seen | part.visible(grid, q_pos, k_pos)
        return seen

    def visited(self, grid: BlockGrid) -> Visited:
        touched, filled = zip(*(part.visited(grid) for part in self.parts), strict=True)
        return Visited(any_of(touched), any_of(filled))

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        states = [part.classify(grid, rows, cols) for part in self.parts]
        full = torch.stack([state.full for state in states]).any(0)
        partial = torch.stack([state.partial for state in states]).any(0) & ~full
        return BlockStates(full, partial, torch.cat([state.keys() for state in states]))

    def __repr__(self) -> str:
        return " | ".join(f"({part!r})" if isinstance(part, Intersection) else repr(part) for part in self.parts)


@dataclass(frozen=True)
class Intersection(Pattern):
    """A pair is visible if every part shows it."""

    parts: tuple[Pattern, ...]

    @property
    def needs_tokens(self) -> bool:
        return any(part.needs_tokens for part in self.parts)

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        return Intersection(tuple(part.resolve(input_ids) for part in self.parts)) if self.needs_tokens else self

    def hides_future(self, grid: BlockGrid) -> bool:
        return any(part.hides_future(grid) for part in self.parts)

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen = self.parts[0].visible(grid, q_pos, k_pos)
        for part in self.parts[1:]:
            seen = seen & part.visible(grid, q_pos, k_pos)
        return seen

    def visited(self, grid: BlockGrid) -> Visited:
        touched, filled = zip(*(part.visited(grid) for part in self.parts), strict=True)
        return Visited(all_of(touched), all_of(filled))

    def classify(self, grid: BlockGrid, rows: Tensor, cols: Tensor) -> BlockStates:
        states = [part.classify(grid, rows, cols) for part in self.parts]
        full = torch.stack([state.full for state in states]).all(0)
        partial = torch.stack([state.full | state.partial for state in states]).all(0) & ~full
        return BlockStates(full, partial, torch.cat([state.keys() for state in states]))

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Union) else repr(part) for part in self.parts)


@lru_cache(maxsize=128)
@on_host
def _cached_layout(pattern: Pattern, grid: BlockGrid, device: torch.device) -> BlockLayout:
    from dynaxx.patterns.build import build_layout

    with torch.inference_mode(False):  # what is cached must serve training, too
        if device.type != "cpu":
            return _cached_layout(pattern, grid, torch.device("cpu")).to(device)
        return build_layout(pattern, grid)
