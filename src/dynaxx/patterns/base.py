# SPDX-License-Identifier: Apache-2.0
"""`Pattern`: a rule over positions, and how rules combine.

A rule says three things about a grid of blocks: which element pairs are visible (the definition), which runs of blocks
it touches and fills in each row, and of a given block which element mask it has. From these `Pattern.layout` builds a
`BlockLayout` in O(visited blocks), without any object of seqlen x seqlen.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.patterns import program
from dynaxx.patterns.bands import band, clipped
from dynaxx.patterns.build import build_layout
from dynaxx.patterns.kinds import Blocks, Kinds, by_distance, distinct, met, packed
from dynaxx.patterns.program import Op
from dynaxx.patterns.runs import Ints, Visited, all_of, any_of

MASKS_AT_ONCE = 512
MANY = 16  # distances


class Pattern(ABC):
    """A rule over positions. Hashable and immutable; combine with `|` (either shows the pair) and `&` (both do).

    Making one raises TypeError or ValueError, with the setting's name, where a setting is of another kind or out of
    range. One of your own needs `visible` and `visited`.
    """

    def __init_subclass__(cls) -> None:
        """Drop the program of a class that shows other pairs than the one it extends."""
        super().__init_subclass__()
        if {"visible", "shows"} & vars(cls).keys() and "program" not in vars(cls):
            cls.program = Pattern.program  # type: ignore[method-assign]

    @typed
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

        Raises:
            TypeError: lengths that are no integers.
            ValueError: a negative length, another block size, a GPU that torch does not see, or a rule that does not
                fit the lengths, as `Documents` of others.
        """
        grid = BlockGrid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, as_block_size(block_size), causal)
        return _cached_layout(self, grid, torch.device(device))

    @property
    def needs_tokens(self) -> bool:
        """Whether a part of it is known only from a request's tokens, so that it must be resolved first."""
        return False

    @property
    def by_distance(self) -> bool:
        """Whether a pair's visibility depends on nothing but how far the key stands before the query."""
        return False

    def hides_future(self, grid: BlockGrid) -> bool:
        """Whether, on a causal grid, it shows no key after the query anyway."""
        return False

    def within_causality(self, grid: BlockGrid) -> Pattern:
        """Return this rule without the pairs that the grid hides: keys after the query, where it is causal."""
        return self & Causal() if grid.causal and not self.hides_future(grid) else self

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        """Return this rule for one request: parts by content (`GlobalContent`) become positions.

        Args:
            input_ids: (seqlen,) token ids of one sequence, up to its last key.
        """
        return self

    @abstractmethod
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return the definition: bool, broadcast of two tensors of positions (query `i` is at `i + grid.offset`)."""

    @abstractmethod
    def visited(self, grid: BlockGrid) -> Visited:
        """Return the blocks that hold every visible pair, as runs; `filled` may leave out blocks that are full."""

    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        """Of a rule `by_distance`, the definition: bool of query minus key positions, in torch or numpy."""
        raise NotImplementedError

    def alike(self, grid: BlockGrid, first: Ints) -> Ints:
        """Of a rule `by_distance`, numbers >= 0 of blocks whose first pairs stand so far apart, whole numbers of the
        smaller block's tokens from one another: equal only where masks are."""
        return np.arange(len(first))

    def program(self, grid: BlockGrid) -> list[int] | None:
        """Return this rule in the numbers of `patterns.program`, from which the compiled core builds the layouts that
        `visited` and `kinds` define; None where only they do."""
        return None

    def leaves(self) -> list[Pattern]:
        """Return the rules of which it is made up, whose masks are found apart."""
        return [self]

    def joined(self, masks: Iterator[Any]) -> Any:
        """Its masks from those of its leaves in turn."""
        return next(masks)

    def kinds(self, blocks: Blocks) -> Kinds:
        """Return the element masks of some blocks. Blocks cut by the end of a sequence count whole.

        Here those of each distance are evaluated, or those of each block; rules that know more are equal say so.
        """
        grid, (q_block, kv_block) = blocks.grid, blocks.grid.block_size
        if self.by_distance:
            first, which = blocks.distances
            if len(first) > MANY:
                numbers = self.alike(grid, first)
                found, place = distinct(numbers, int(numbers.max()) + 1)
                example = np.empty_like(found)
                example[place] = np.arange(len(place))
                first, which = first[example], place.take(which)
            return by_distance(
                self.shows(grid, first[:, None] + np.arange(1 - kv_block, q_block)), which, grid.block_size
            )
        q_pos = torch.from_numpy(blocks.rows * q_block + grid.offset)[:, None, None] + torch.arange(q_block)[:, None]
        k_pos = torch.from_numpy(blocks.cols * kv_block)[:, None, None] + torch.arange(kv_block)
        some = zip(q_pos.split(MASKS_AT_ONCE), k_pos.split(MASKS_AT_ONCE), strict=True)
        shown = [self.visible(grid, q, k).expand(len(q), q_block, kv_block) for q, k in some]
        return Kinds(np.arange(len(q_pos)), np.concatenate([packed(each.numpy()) for each in shown]))

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
class Combined(Pattern):
    """Several rules, put together pair by pair."""

    parts: tuple[Pattern, ...]
    both: ClassVar[Callable[[Any, Any], Any]]  # on two masks, or words of them, in torch and numpy alike
    op: ClassVar[Op]

    @property
    def needs_tokens(self) -> bool:
        return any(part.needs_tokens for part in self.parts)

    @property
    def by_distance(self) -> bool:
        return all(part.by_distance for part in self.parts)

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        return type(self)(tuple(part.resolve(input_ids) for part in self.parts)) if self.needs_tokens else self

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return reduce(type(self).both, (part.visible(grid, q_pos, k_pos) for part in self.parts))

    def program(self, grid: BlockGrid) -> list[int] | None:
        numbers: list[int] = []
        for part in self.parts:
            program = part.program(grid)
            if program is None:
                return None
            numbers += program
        return [*numbers, self.op, len(self.parts)]

    def leaves(self) -> list[Pattern]:
        return [leaf for part in self.parts for leaf in part.leaves()]

    def joined(self, masks: Iterator[Any]) -> Any:
        return reduce(type(self).both, (part.joined(masks) for part in self.parts))

    def kinds(self, blocks: Blocks) -> Kinds:
        kind, masks = met([leaf.kinds(blocks) for leaf in self.leaves()])
        return Kinds(kind, self.joined(iter(masks)))


class Union(Combined):
    """A pair is visible if any part shows it."""

    both = operator.or_
    op = Op.ANY

    def hides_future(self, grid: BlockGrid) -> bool:
        return all(part.hides_future(grid) for part in self.parts)

    def visited(self, grid: BlockGrid) -> Visited:
        touched, filled = zip(*(part.visited(grid) for part in self.parts), strict=True)
        return Visited(any_of(touched), any_of(filled))

    def __repr__(self) -> str:
        return " | ".join(f"({part!r})" if isinstance(part, Intersection) else repr(part) for part in self.parts)


class Intersection(Combined):
    """A pair is visible if every part shows it."""

    both = operator.and_
    op = Op.ALL

    def hides_future(self, grid: BlockGrid) -> bool:
        return any(part.hides_future(grid) for part in self.parts)

    def visited(self, grid: BlockGrid) -> Visited:
        touched, filled = zip(*(part.visited(grid) for part in self.parts), strict=True)
        return Visited(all_of(touched), all_of(filled))

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Union) else repr(part) for part in self.parts)


class DistanceRule(Pattern):
    """A rule on the distance between query and key; `shows` defines it."""

    @property
    def by_distance(self) -> bool:
        return True

    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen: Tensor = self.shows(grid, q_pos - k_pos)
        return seen


@dataclass(frozen=True)
class Causal(DistanceRule):
    """Keys at or before the query."""

    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        return distance >= 0

    def alike(self, grid: BlockGrid, first: Ints) -> Ints:
        return clipped(grid, first, 0, 0)

    def program(self, grid: BlockGrid) -> list[int]:
        return program.band(0, None)

    def visited(self, grid: BlockGrid) -> Visited:
        return band(grid, 0, None)


@LayoutCache
@on_host
def _cached_layout(pattern: Pattern, grid: BlockGrid, device: torch.device) -> BlockLayout:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` must be one that torch sees, got {device}: torch.cuda.is_available() is False")
    with torch.inference_mode(False):  # a cached layout must serve training, too
        return build_layout(pattern, grid, device)
