# SPDX-License-Identifier: Apache-2.0
"""Turn a pattern into what a gather needs: where its keys can lie, and which pairs it shows, for any length.

`Pattern.program` encodes a pattern as numbers. This module derives from them the pattern's reach (a band of distances
around each query, ranges of keys that all queries see, ranges of queries that see all keys) and a mask of positions in
plain torch, which every exporter supports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid
from dynaxx.patterns import Pattern
from dynaxx.patterns.program import Op

LONG = 1 << 26  # tokens: longer than any sequence, and short enough for int32 arithmetic
UNBOUNDED = LONG // 4  # distances of at least this many tokens count as unlimited

Ranges = tuple[tuple[int, int], ...]  # (first, last + 1) of each range


class Node(NamedTuple):
    """One rule of a program, with the rules that it combines."""

    op: Op
    numbers: tuple[int, ...]
    parts: tuple[Node, ...] = ()


class Reach(NamedTuple):
    """A bound on the pairs that a rule shows: each lies in the band, or has one of the keys or queries."""

    band: tuple[int, int] | None = None  # lo <= query - key <= hi
    keys: Ranges = ()
    queries: Ranges = ()


@dataclass(frozen=True)
class GatherRule:
    """A static rule that shows each query block a fixed number of keys at every length."""

    node: Node  # the rule as a tree
    reach: Reach  # where its pairs lie
    block_size: tuple[int, int]  # (q_block, kv_block), which rules on whole blocks depend on
    sees_itself: bool  # whether every query sees its own key, so that no row is empty

    @classmethod
    def of(cls, pattern: Pattern, block_size: tuple[int, int], *, causal: bool) -> GatherRule:
        """Return the rule of a pattern.

        Raises:
            ValueError: the pattern has no fixed number of keys per query block; the message has the reason.
        """
        grid = BlockGrid(LONG, LONG, block_size, causal)
        if pattern.needs_tokens:
            raise ValueError(f"{pattern!r} depends on token ids, which are known only when a request arrives")
        try:
            numbers = pattern.within_causality(grid).program(grid)
            shorter = BlockGrid(LONG // 2, LONG // 2, block_size, causal)
            same = numbers == pattern.within_causality(shorter).program(shorter)
        except ValueError as error:
            raise ValueError(f"{pattern!r} holds for one length only: {error}") from None
        if numbers is None:
            raise ValueError(f"{pattern!r} is a pattern of your own, without a program")
        if not same:
            raise ValueError(f"{pattern!r} depends on the length of the sequence")
        node = parse(numbers)
        reach = reach_of(node, block_size)
        if reach is None:
            raise ValueError(f"{pattern!r} shows a query more keys in a longer sequence")
        return cls(node, reach, block_size, _shows_itself(node))

    def visible(self, q_pos: Tensor, k_pos: Tensor, offset: int) -> Tensor:
        """Return whether queries at `q_pos` see keys at `k_pos`, bool; `offset` is the position of query 0."""
        return _visible(self.node, q_pos, k_pos, offset, self.block_size)


def operands(op: int, first: int) -> int:
    """Return the number of operands of an operation whose first one is given."""
    return {
        Op.BAND: 2,
        Op.RANDOM_BLOCKS: 2,
        Op.KEYS: 1 + 2 * first,
        Op.QUERIES: 1 + 2 * first,
        Op.DOCUMENTS: 1 + first,
    }.get(Op(op), 1)


def parse(numbers: list[int]) -> Node:
    """Return the tree that a program describes."""
    stack: list[Node] = []
    at = 0
    while at < len(numbers):
        op, first = Op(numbers[at]), numbers[at + 1]
        count = operands(op, first)
        own = tuple(numbers[at + 1 : at + 1 + count])
        if op in (Op.ANY, Op.ALL):
            parts = tuple(stack[-first:])
            del stack[-first:]
            stack.append(Node(op, own, parts))
        else:
            stack.append(Node(op, own))
        at += 1 + count
    (node,) = stack
    return node


def reach_of(node: Node, block_size: tuple[int, int]) -> Reach | None:
    """Return a bound on the pairs that a rule shows; None if no bound holds for all lengths."""
    if node.op is Op.BAND:
        lo, hi = node.numbers
        return Reach((lo, hi)) if -lo < UNBOUNDED and hi < UNBOUNDED else None
    if node.op is Op.LOCAL_BLOCKS:
        q_block, kv_block = block_size
        hi = node.numbers[0] * kv_block - 1
        return Reach((2 - q_block - kv_block, hi)) if hi < UNBOUNDED else None
    if node.op in (Op.KEYS, Op.QUERIES):
        ranges = tuple((a, b) for a, b in zip(node.numbers[1::2], node.numbers[2::2], strict=True) if a < b)
        if any(b >= UNBOUNDED for _, b in ranges):
            return None
        return Reach(keys=ranges) if node.op is Op.KEYS else Reach(queries=ranges)
    if node.op is Op.ANY:
        found = _reaches(node, block_size)
        return reduce(_either, found) if len(found) == len(node.parts) else None
    if node.op is Op.ALL:
        found = _reaches(node, block_size)
        if not found:
            return None
        least = max((part.numbers[0] for part in node.parts if part.op is Op.BAND), default=-LONG)
        return _within(min(found, key=_cost), least)
    return None


def _reaches(node: Node, block_size: tuple[int, int]) -> list[Reach]:
    return [each for each in (reach_of(part, block_size) for part in node.parts) if each is not None]


def _either(a: Reach, b: Reach) -> Reach:
    bands = [each for each in (a.band, b.band) if each is not None]
    band = (min(lo for lo, _ in bands), max(hi for _, hi in bands)) if bands else None
    return Reach(band, _merged(a.keys + b.keys), _merged(a.queries + b.queries))


def _within(reach: Reach, least: int) -> Reach:
    """Return the part of a reach with distances >= `least`."""
    band = None if reach.band is None else (max(reach.band[0], least), reach.band[1])
    if least < 0:
        return Reach(band, reach.keys, reach.queries)
    behind = tuple((0, end) for _, end in reach.queries)  # these queries see no key beyond their own
    return Reach(band, _merged(reach.keys + behind), ())


def _cost(reach: Reach) -> int:
    band = 0 if reach.band is None else reach.band[1] - reach.band[0] + 1
    return band + sum(b - a for a, b in reach.keys) + UNBOUNDED * len(reach.queries)


def _merged(ranges: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return tuple(found)


def _shows_itself(node: Node) -> bool:
    if node.op is Op.BAND:
        return node.numbers[0] <= 0 <= node.numbers[1]
    if node.op is Op.ANY:
        return any(_shows_itself(part) for part in node.parts)
    if node.op is Op.ALL:
        return all(_shows_itself(part) for part in node.parts)
    return node.op in (Op.MULTIPLES, Op.LOCAL_BLOCKS)


def _visible(node: Node, q_pos: Tensor, k_pos: Tensor, offset: int, block_size: tuple[int, int]) -> Tensor:
    if node.op is Op.BAND:
        lo, hi = node.numbers
        distance = q_pos - k_pos
        if -lo >= UNBOUNDED:
            return distance <= hi if hi < UNBOUNDED else distance == distance
        return distance >= lo if hi >= UNBOUNDED else (distance >= lo) & (distance <= hi)
    if node.op is Op.MULTIPLES:
        return torch.remainder(q_pos - k_pos, node.numbers[0]) == 0
    if node.op in (Op.KEYS, Op.QUERIES):
        at = k_pos if node.op is Op.KEYS else q_pos
        return inside(at, tuple(zip(node.numbers[1::2], node.numbers[2::2], strict=True)))
    if node.op is Op.LOCAL_BLOCKS:
        q_block, kv_block = block_size
        row = _quotient(q_pos - offset, q_block)
        last = _quotient((row + 1) * q_block - 1 + offset, kv_block)
        block = _quotient(k_pos, kv_block)
        return (block <= last) & (block > last - node.numbers[0])
    both = torch.logical_or if node.op is Op.ANY else torch.logical_and
    return reduce(both, (_visible(part, q_pos, k_pos, offset, block_size) for part in node.parts))


def inside(at: Tensor, ranges: Ranges) -> Tensor:
    """Return, in the shape of `at`, whether positions lie in one of some ranges (first, end)."""
    if not ranges:
        return at != at
    return reduce(torch.logical_or, ((at >= first) & (at < end) for first, end in ranges))


def _quotient(x: Tensor, size: int) -> Tensor:
    return torch.div(x, size, rounding_mode="floor")
