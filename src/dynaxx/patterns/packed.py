# SPDX-License-Identifier: Apache-2.0
"""Build one layout for a packed batch from one pattern."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dynaxx.arguments import typed
from dynaxx.layout import EMPTY, FULL, BlockGrid, BlockLayout, as_block_size
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import lasting
from dynaxx.layout.packed import CuSeqlens, PackedLayout, host_lengths, pack_layouts, with_lengths
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.build import assembled_layout, build_layout
from dynaxx.patterns.documents import Documents
from dynaxx.patterns.kinds import Words
from dynaxx.patterns.program import FAR, Op
from dynaxx.patterns.runs import Ints

MAX_TERMS = 8
BLOCKS_AT_ONCE = 2048  # blocks whose masks are computed together; bounds temporary memory


class Term(NamedTuple):
    """Pairs with least <= query - key <= most, for a run of keys and a run of queries, in positions of keys."""

    least: int = -FAR
    most: int = FAR
    key: int = 0
    key_end: int = FAR
    query: int = -FAR
    query_end: int = FAR

    def meet(self, other: Term) -> Term:
        """Return the pairs of both."""
        pairs = zip(self, other, (max, min, max, min, max, min), strict=True)
        return Term(*(choose(a, b) for a, b, choose in pairs))


def terms_of(program: list[int] | None) -> list[Term] | None:
    """Return terms whose union is a rule, from the rule's `program`; None if it has others, or too many."""
    stack: list[list[Term]] = []
    at = 0
    while program is not None and at < len(program):
        op, count = program[at], program[at + 1]
        if op == Op.BAND:
            stack.append([Term(least=count, most=program[at + 2])])
            at += 3
        elif op in (Op.KEYS, Op.QUERIES):
            ends = program[at + 2 : at + 2 + 2 * count]
            runs = zip(ends[::2], ends[1::2], strict=True)
            stack.append([Term(key=a, key_end=b) if op == Op.KEYS else Term(query=a, query_end=b) for a, b in runs])
            at += 2 + 2 * count
        elif op in (Op.ANY, Op.ALL):
            parts, stack = stack[-count:], stack[:-count]
            terms = parts[0]
            for part in parts[1:]:
                terms = terms + part if op == Op.ANY else [a.meet(b) for a in terms for b in part]
            stack.append(terms)
            at += 2
        else:
            return None
        if len(stack[-1]) > MAX_TERMS:
            return None
    return stack[0] if len(stack) == 1 else None


def layout_of_terms(rule: Pattern, ends_q: Ints, ends_k: Ints, block_size: tuple[int, int], causal: bool
) -> BlockLayout | None:  # fmt: skip
    """Return the layout over the packed axis, on the host; None if the rule has no terms.

    Args:
        rule: the rule, in positions of each sequence.
        ends_q: (sequences + 1,) cumulative numbers of queries, with a last one above 0.
        ends_k: (sequences + 1,) cumulative numbers of keys, the same.
        block_size: (q_block, kv_block).
        causal: hide keys after the query.
    """
    numbers = _numbers(rule, np.diff(ends_q), np.diff(ends_k), block_size, causal)
    if numbers is None:
        return None
    grid = BlockGrid(int(ends_q[-1]), int(ends_k[-1]), block_size, causal=False)
    start, stop, sequence = _seen_keys(numbers, ends_q, ends_k)
    q_block, kv_block = block_size
    row_of = np.arange(len(sequence)) // q_block
    block = _touched(start, stop, sequence, row_of, grid)
    rows, cols = block // grid.kv_blocks, block % grid.kv_blocks
    first_of_row = np.arange(grid.q_blocks) * q_block
    latest, soonest = np.maximum.reduceat(start, first_of_row, 1), np.minimum.reduceat(stop, first_of_row, 1)
    until = np.minimum((cols + 1) * kv_block, grid.seqlen_k)
    full = ((latest[:, rows] <= cols * kv_block) & (soonest[:, rows] >= until)).any(0)
    bits, mask_ids = _masks(start, stop, rows[~full], cols[~full], grid)
    return assembled_layout(grid, (rows[~full], cols[~full], mask_ids), (rows[full], cols[full]), bits)


def _numbers(
    rule: Pattern, lengths_q: Ints, lengths_k: Ints, block_size: tuple[int, int], causal: bool
) -> NDArray[np.int64] | None:
    """Return the terms of each sequence, (m, 6, sequences); None if the rule has no terms."""
    pairs = np.stack([lengths_q, lengths_k])
    if rule.by_distance:  # such a rule depends on the offset of queries alone; distances beyond a grid are cut
        offset = lengths_k - lengths_q
        pairs = pairs.max() + np.stack([np.maximum(-offset, 0), np.maximum(offset, 0)])
    found, which = np.unique(pairs[0] << 32 | pairs[1], return_inverse=True)
    every: list[list[Term]] = []
    for pair in found.tolist():
        grid = BlockGrid(pair >> 32, pair & 0xFFFFFFFF, block_size, causal)
        terms = terms_of(rule.within_causality(grid).program(grid))
        if terms is None:
            return None
        every.append(terms)
    most = max(map(len, every))
    nothing = Term(key_end=0)
    padded = [terms + [nothing] * (most - len(terms)) for terms in every]
    return np.array(padded, np.int64).reshape(len(padded), most, 6).transpose(1, 2, 0)[:, :, which]


def _seen_keys(numbers: NDArray[np.int64], ends_q: Ints, ends_k: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the packed keys start .. stop - 1 that each query sees by each term, (m, T), and its sequence (T,)."""
    lengths_q, lengths_k = np.diff(ends_q), np.diff(ends_k)
    sequence = np.arange(len(lengths_q)).repeat(lengths_q)
    position = np.arange(len(sequence)) + (lengths_k - lengths_q - ends_q[:-1])[sequence]
    per_query = lambda x: x[:, :1] if (x == x[:, :1]).all() else x[:, sequence]
    least, most, key, key_end, query, query_end = map(per_query, numbers.transpose(1, 0, 2))
    start = np.maximum(np.maximum(position - most, key), 0)
    stop = np.minimum(np.minimum(position - least, key_end - 1) + 1, lengths_k[sequence])
    unseen = (start >= stop) | (position < query) | (position >= query_end)
    first = ends_k[sequence]
    start, stop = np.where(unseen, ends_k[-1], start + first), np.where(unseen, 0, stop + first)
    return start.astype(np.int32), stop.astype(np.int32), sequence


def _touched(start: Ints, stop: Ints, sequence: Ints, row_of: Ints, grid: BlockGrid) -> Ints:
    """Return row * kv_blocks + column of the blocks that hold a visible pair, ascending."""
    changes = (sequence[1:] != sequence[:-1]) | (row_of[1:] != row_of[:-1])
    segments = np.concatenate([np.zeros(1, np.int64), changes.nonzero()[0] + 1])
    first = np.minimum.reduceat(start, segments, 1) // grid.block_size[1]
    end = (np.maximum.reduceat(stop, segments, 1) - 1) // grid.block_size[1] + 1
    count = np.maximum(end - first, 0).ravel()
    base = (row_of[segments] * grid.kv_blocks + first).ravel()
    shift = (base - count.cumsum() + count).repeat(count)
    block = shift + np.arange(len(shift))
    return np.unique(block) if len(start) > 1 else block[np.append(True, block[1:] != block[:-1])[: len(block)]]


def _masks(start: Ints, stop: Ints, rows: Ints, cols: Ints, grid: BlockGrid) -> tuple[Words, Ints]:
    """Return the distinct element masks of some blocks, (masks, q_block, words), and the mask id of each block."""
    (q_block, kv_block), tokens = grid.block_size, start.shape[1]
    width = min(kv_block, 64)  # bits per word
    up_to = np.array([(1 << count) - 1 for count in range(width + 1)], np.uint64)
    words = np.zeros((len(rows), q_block, kv_block // width), np.uint64)
    for at in range(0, len(rows), BLOCKS_AT_ONCE):
        some = slice(at, at + BLOCKS_AT_ONCE)
        query = rows[some, None] * q_block + np.arange(q_block)
        past, query = query >= tokens, np.minimum(query, tokens - 1)
        begin = (cols[some, None] * kv_block).astype(np.int32)
        for a, b in zip(start, stop, strict=True):
            a, b = a.take(query) - begin, b.take(query) - begin
            b[past] = 0
            for i in range(words.shape[2]):
                low, high = (up_to.take(x - width * i, mode="clip") for x in (a, b))
                words[some, :, i] |= high & ~low
    flat = words.reshape(len(words), q_block * words.shape[2])
    weights = np.random.default_rng(0).integers(1, 2**63, flat.shape[1], np.uint64) | np.uint64(1)
    _, example, which = np.unique(flat @ weights, return_index=True, return_inverse=True)
    if not (flat[example][which] == flat).all():  # two masks have one hash
        example = which = np.arange(len(flat))
    distinct = words[example]
    whole, none = (distinct == up_to[-1]).all((1, 2)), ~distinct.any((1, 2))
    kept = ~(whole | none)
    mask_ids = np.where(whole, FULL, np.where(none, EMPTY, kept.cumsum() - 1))
    bits = distinct[kept].view(np.uint32)  # of little-endian words: the low half first
    return np.ascontiguousarray(bits[..., : -(-kv_block // 32)] if width < 64 else bits).view(np.int32), mask_ids[which]


@typed
@lasting
def packed_layout(
    rule: Pattern,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> PackedLayout:
    """Build the layout of a pattern over packed sequences, which do not see each other.

    Positions count from the start of each sequence. Each sequence gets the layout that it would have alone, with its
    queries aligned to its last keys.

    Args:
        rule: a pattern; for a selector, which needs q and k, see `select_packed_blocks`.
        cu_seqlens_q: (num_seqs + 1,) cumulative numbers of queries, starting with 0; a sequence may be empty.
        cu_seqlens_k: (num_seqs + 1,) cumulative numbers of keys; `cu_seqlens_q` by default.
        causal: hide keys after the query.
        block_size: tokens per block, or (q_block, kv_block), as in `Pattern.layout`.
        device: the device of the layout, which is built on the host. Keep the lengths on the host as well: lengths on a
            GPU are read back, which synchronizes.

    Returns:
        A layout for `sparse_attention` with q, k, v of (tokens, heads, head_dim). It is cached by value.

    Raises:
        TypeError: `rule` is not a pattern.
        ValueError: the lengths do not start at 0, decrease, or describe different numbers of sequences.
    """
    if not isinstance(rule, Pattern):
        raise TypeError(f"`rule` must be a pattern, got {rule!r}; a selector needs q and k: use select_packed_blocks")
    ends_q = host_lengths("cu_seqlens_q", cu_seqlens_q)
    ends_k = ends_q if cu_seqlens_k is None else host_lengths("cu_seqlens_k", cu_seqlens_k)
    return _cached(rule, ends_q, ends_k, as_block_size(block_size), causal, torch.device(device))


def _of_all_sequences(
    rule: Pattern, ends_q: tuple[int, ...], ends_k: tuple[int, ...], block_size: tuple[int, int], causal: bool
) -> BlockLayout | None:
    """Return the layout of a rule for which all sequences can be laid out at once, else None."""
    if rule.by_distance and ends_q == ends_k:  # distances do not depend on where a sequence starts
        return build_layout(Documents(ends_k) & rule, BlockGrid(ends_q[-1], ends_k[-1], block_size, causal))
    return layout_of_terms(rule, np.array(ends_q), np.array(ends_k), block_size, causal)


@LayoutCache
def _cached(
    rule: Pattern,
    ends_q: tuple[int, ...],
    ends_k: tuple[int, ...],
    block_size: tuple[int, int],
    causal: bool,
    device: torch.device,
) -> PackedLayout:
    if device.type != "cpu":
        return _cached(rule, ends_q, ends_k, block_size, causal, torch.device("cpu")).to(device)
    if len(ends_q) != len(ends_k):
        raise ValueError(
            "`cu_seqlens_q` and `cu_seqlens_k` must describe the same number of sequences, "
            f"got {len(ends_q) - 1} and {len(ends_k) - 1}"
        )
    if min(ends_q[-1], ends_k[-1]):
        layout = _of_all_sequences(rule, ends_q, ends_k, block_size, causal)
        if layout is not None:
            return with_lengths(layout, ends_q, ends_k)
    built: dict[tuple[int, int], BlockLayout | None] = {}
    layouts = []
    for s in range(len(ends_q) - 1):
        lengths = (ends_q[s + 1] - ends_q[s], ends_k[s + 1] - ends_k[s])
        if lengths not in built:
            grid = BlockGrid(*lengths, block_size, causal)
            built[lengths] = build_layout(rule, grid) if min(lengths) else None
        layouts.append(built[lengths])
    return pack_layouts(layouts, ends_q, ends_k, block_size=block_size)
