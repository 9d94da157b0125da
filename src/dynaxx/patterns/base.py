# SPDX-License-Identifier: Apache-2.0
"""`Pattern`, the base class of rules over positions, and the classes that combine rules.

A rule answers three questions about a grid of blocks: which element pairs are visible (the definition), which runs of
blocks it touches and fills in each row, and which element mask a given block has. `Pattern.layout` builds a
`BlockLayout` from the answers in O(visited blocks), and makes no object of size seqlen x seqlen.
"""

from __future__ import annotations

import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.patterns import program
from dynaxx.patterns.build import build_layout
from dynaxx.patterns.kinds import Blocks, Kinds, by_distance, distinct, met, packed
from dynaxx.patterns.program import Op
from dynaxx.patterns.runs import Ints, Runs, Visited, all_of, any_of, band, checked_visited, clipped
from dynaxx.settings import Configured, registered

LARGEST = (128, 128)  # block size
MASKS_AT_ONCE = 512
MANY = 16  # distances; with more of them, equal ones are merged first


class Pattern(Configured, ABC):
    """A rule over positions.

    Patterns are immutable and hashable. Combine them with `|` (a pair is visible if either shows it) and `&` (if both
    do). A constructor raises TypeError or ValueError, and names the setting, if a setting has a wrong type or is out of
    range. A subclass must define `visible` and `visited`; with a kind, policies may name it (see `Configured`).
    """

    stands_alone: ClassVar[bool] = True  # whether `layout` needs no more than lengths and token ids

    def __init_subclass__(cls, **more: Any) -> None:
        """Reset the inherited `program` if a subclass redefines which pairs are visible."""
        super().__init_subclass__(**more)
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
            device: the device of the layout's tensors.

        Returns:
            A layout shared by all batch entries and heads. Layouts are cached by value. They are computed on the host
            from host integers and copied to the device, so the call never synchronizes with a GPU.

        Raises:
            TypeError: a length is not an integer.
            ValueError: a length is negative, the block size is not supported, torch does not see the GPU, or the rule
                does not fit the lengths, for example `Documents` of another total length.
        """
        grid = BlockGrid(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, as_block_size(block_size), causal)
        try:
            return _cached_layout(self, grid, torch.device(device))
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            raise TypeError(
                f"a pattern must be hashable, because layouts are cached by value: {error}; make its class a "
                "dataclass(frozen=True) whose fields are numbers or tuples"
            ) from None

    @property
    def needs_tokens(self) -> bool:
        """Return whether the rule depends on a request's tokens, so that `resolve` must be called first."""
        return False

    @property
    def by_distance(self) -> bool:
        """Return whether the visibility of a pair depends only on the distance from key to query."""
        return False

    @property
    def by_blocks(self) -> bool:
        """Return whether the visibility of a pair depends on where the query's block starts."""
        return False

    def hides_future(self, grid: BlockGrid) -> bool:
        """Return whether the rule itself shows no key after the query on a causal grid."""
        return False

    def within_causality(self, grid: BlockGrid) -> Pattern:
        """Return this rule without the pairs that a causal grid hides, that is, keys after the query."""
        return self & Causal() if grid.causal and not self.hides_future(grid) else self

    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        """Return this rule for one request, with parts that depend on content (`GlobalContent`) turned into positions.

        Args:
            input_ids: (seqlen,) token ids of one sequence, up to its last key.
        """
        return self

    @abstractmethod
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return which pairs are visible; this defines the rule.

        Args:
            grid: the grid of blocks.
            q_pos: positions of queries; query `i` is at position `i + grid.offset`.
            k_pos: positions of keys, in a shape that broadcasts with `q_pos`.

        Returns:
            A bool tensor of the broadcast shape.
        """

    @abstractmethod
    def visited(self, grid: BlockGrid) -> Visited:
        """Return runs of blocks that hold every visible pair. `filled` may leave out blocks that are full."""

    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        """Return which distances (query minus key position) are visible, in torch or numpy.

        This defines a rule with `by_distance`.
        """
        raise NotImplementedError

    def mask_kinds(self, grid: BlockGrid, first: Ints) -> Ints:
        """Return a number >= 0 for each block of a rule with `by_distance`; equal numbers mean equal masks.

        Args:
            grid: the grid of blocks.
            first: the distance of each block's first pair. These distances differ by multiples of the smaller block
                size.
        """
        return np.arange(len(first))

    def program(self, grid: BlockGrid) -> list[int] | None:
        """Return this rule as numbers (see `patterns.program`) for the compiled core.

        The core builds the same layouts that `visited` and `kinds` define. None means that only numpy builds them.
        """
        return None

    def leaves(self) -> list[Pattern]:
        """Return the elementary rules that this rule combines."""
        return [self]

    def joined(self, masks: Iterator[Any]) -> Any:
        """Return the masks of this rule from the masks of its leaves, taken in order."""
        return next(masks)

    def kinds(self, blocks: Blocks) -> Kinds:
        """Return the element masks of some blocks. A block that the sequence's end cuts counts as whole.

        This default evaluates one mask per distance, or one per block. Rules override it to share more masks.
        """
        grid, (q_block, kv_block) = blocks.grid, blocks.grid.block_size
        if self.by_distance:
            first, which = blocks.distances
            if len(first) > MANY:
                numbers = self.mask_kinds(grid, first)
                found, place = distinct(numbers, int(numbers.max()) + 1)
                example = np.empty_like(found)
                example[place] = np.arange(len(place))
                first, which = first[example], place.take(which)
            return by_distance(
                self.shows(grid, first[:, None] + np.arange(1 - kv_block, q_block)), which, grid.block_size
            )
        q_pos = (
            torch.from_numpy(blocks.rows * q_block + grid.offset)[:, None, None]
            + torch.arange(q_block, device="cpu")[:, None]
        )
        k_pos = torch.from_numpy(blocks.cols * kv_block)[:, None, None] + torch.arange(kv_block, device="cpu")
        some = zip(q_pos.split(MASKS_AT_ONCE), k_pos.split(MASKS_AT_ONCE), strict=True)
        shown = [self._shown(grid, q, k).expand(len(q), q_block, kv_block) for q, k in some]
        return Kinds(np.arange(len(q_pos)), np.concatenate([packed(each.numpy()) for each in shown]))

    def _shown(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return `visible`, which may be the user's own, after a check of what it returns."""
        found: object = self.visible(grid, q_pos, k_pos)
        shape = torch.broadcast_shapes(q_pos.shape, k_pos.shape)
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            said = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(f"`visible` of {type(self).__name__} must return a bool tensor, got {said}")
        if found.ndim > len(shape) or any(
            n not in (1, m) for n, m in zip(found.shape[::-1], shape[::-1], strict=False)
        ):
            raise ValueError(
                f"`visible` of {type(self).__name__} must return the shape to which q_pos and k_pos broadcast, "
                f"{tuple(shape)}, got {tuple(found.shape)}"
            )
        return found

    def __or__(self, other: object) -> Pattern:
        """Return the pattern that shows a pair if either pattern does."""
        return Union(_flat(Union, self) + _flat(Union, other)) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: object) -> Pattern:
        """Return the pattern that shows a pair if both patterns do."""
        return (
            Intersection(_flat(Intersection, self) + _flat(Intersection, other))
            if isinstance(other, Pattern)
            else NotImplemented
        )


def _flat(kind: type[Union] | type[Intersection], pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.parts if isinstance(pattern, kind) else (pattern,)


@dataclass(frozen=True)
class Combined(Pattern):
    """Several rules, combined pair by pair."""

    parts: tuple[Pattern, ...]
    combine: ClassVar[Callable[[Any, Any], Any]]  # combines two masks or packed masks, in torch or numpy
    op: ClassVar[Op]

    @classmethod
    @override
    def random(cls, rng: random.Random, seqlen_k: int) -> Self:
        parts = [part for part in registered(Pattern) if not issubclass(part, Combined)]
        return cls(tuple(part.random(rng, seqlen_k) for part in rng.sample(parts, 2)))

    @staticmethod
    def combine_runs(parts: Sequence[Runs]) -> Runs:
        """Return the blocks of the whole rule from those of its parts."""
        raise NotImplementedError

    @property
    @override
    def needs_tokens(self) -> bool:
        return any(part.needs_tokens for part in self.parts)

    @property
    @override
    def by_distance(self) -> bool:
        return all(part.by_distance for part in self.parts)

    @property
    @override
    def by_blocks(self) -> bool:
        return any(part.by_blocks for part in self.parts)

    @override
    def resolve(self, input_ids: Tensor | Sequence[int]) -> Pattern:
        return type(self)(tuple(part.resolve(input_ids) for part in self.parts)) if self.needs_tokens else self

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return reduce(type(self).combine, (part.visible(grid, q_pos, k_pos) for part in self.parts))

    @override
    def program(self, grid: BlockGrid) -> list[int] | None:
        numbers: list[int] = []
        for part in self.parts:
            own = part.program(grid)
            if own is None:
                return None
            numbers += own
        return [*numbers, self.op, len(self.parts)]

    @override
    def leaves(self) -> list[Pattern]:
        return [leaf for part in self.parts for leaf in part.leaves()]

    @override
    def joined(self, masks: Iterator[Any]) -> Any:
        return reduce(type(self).combine, (part.joined(masks) for part in self.parts))

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        parts = [checked_visited(part, grid.q_blocks, part.visited(grid)) for part in self.parts]
        touched, filled = zip(*parts, strict=True)
        return Visited(self.combine_runs(touched), self.combine_runs(filled))

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        kind, masks = met([leaf.kinds(blocks) for leaf in self.leaves()])
        return Kinds(kind, self.joined(iter(masks)))


class Union(Combined, kind="any_of"):
    """A pair is visible if any part shows it."""

    combine = operator.or_
    combine_runs = staticmethod(any_of)
    op = Op.ANY

    @override
    def hides_future(self, grid: BlockGrid) -> bool:
        return all(part.hides_future(grid) for part in self.parts)

    def __repr__(self) -> str:
        """Return the parts, joined by `|`."""
        return " | ".join(f"({part!r})" if isinstance(part, Intersection) else repr(part) for part in self.parts)


class Intersection(Combined, kind="all_of"):
    """A pair is visible if every part shows it."""

    combine = operator.and_
    combine_runs = staticmethod(all_of)
    op = Op.ALL

    @override
    def hides_future(self, grid: BlockGrid) -> bool:
        return any(part.hides_future(grid) for part in self.parts)

    def __repr__(self) -> str:
        """Return the parts, joined by `&`."""
        return " & ".join(f"({part!r})" if isinstance(part, Union) else repr(part) for part in self.parts)


class DistanceRule(Pattern):
    """A rule on the distance between query and key, defined by `shows`."""

    @property
    @override
    def by_distance(self) -> bool:
        return True

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        seen: Tensor = self.shows(grid, q_pos - k_pos)
        return seen


class BandRule(DistanceRule):
    """A rule that shows the distances of a band."""

    @abstractmethod
    def limits(self, grid: BlockGrid) -> tuple[int | None, int | None]:
        """Return the bounds of the band lo <= query - key <= hi. None means unlimited."""

    @override
    def shows(self, grid: BlockGrid, distance: Any) -> Any:
        lo, hi = self.limits(grid)
        seen = distance == distance if lo is None else distance >= lo
        return seen if hi is None else seen & (distance <= hi)

    @override
    def mask_kinds(self, grid: BlockGrid, first: Ints) -> Ints:
        ends = [end for end in self.limits(grid) if end is not None] or [0]
        return clipped(grid, first, min(ends), max(ends))

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        return program.band(*self.limits(grid))

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        return band(grid, *self.limits(grid))


@dataclass(frozen=True)
class Causal(BandRule, kind="causal"):
    """Keys at or before the query."""

    @override
    def hides_future(self, grid: BlockGrid) -> bool:
        return grid.causal

    @override
    def limits(self, grid: BlockGrid) -> tuple[int | None, int | None]:
        return 0, None


@LayoutCache
@on_host
def _cached_layout(pattern: Pattern, grid: BlockGrid, device: torch.device) -> BlockLayout:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` must be one that torch sees, got {device}: torch.cuda.is_available() is False")
    layout = build_layout(pattern, grid, device)
    if device.type == "cuda" and pattern.by_distance and grid.block_size != LARGEST:
        larger = BlockGrid(grid.seqlen_q, grid.seqlen_k, LARGEST, grid.causal)
        layout.derived.larger = partial(_cached_layout, pattern, larger, device)
    return layout
