# SPDX-License-Identifier: Apache-2.0
"""Splitting of rows or columns that are much longer than the others, to balance the load of multiprocessors.

A global token or a sink is part of every row, so its column is as long as the sequence. The parts of such a line are
computed by separate programs, which start first (`parts`). Each of them writes fp32 sums, which are added in a fixed
order (`split_sums`). A line is a row of a layout, or a column of all heads of a group, one head after another.

    lines      0  1  2  3  4           limit = 4 entries
    entries    2  9  3  1  4           line 1 is split
    parts      line 1: [0, 3) [3, 6) [6, 9)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import processors
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout import BlockLayout
from dynaxx.layout.derived import PerLayout
from dynaxx.layout.host import dense_size, dense_views

SPLIT_SIZES = ["num_parts", "limit", "batch_copies", "head_copies"]  # arguments that never specialize a kernel
SHARE = 2  # parts per multiprocessor's share of the work, so that a finished multiprocessor can start another part


class SplitLines(NamedTuple):
    """The lines with more than `limit` entries, in parts of even length. Layouts that heads share are listed once."""

    limit: int
    parts: Tensor  # (parts, 3) int32: line, first entry, last entry + 1; the latter are equal in an empty slot
    lines: Tensor  # (split lines, 3) int32: line, first part, number of parts; 0 parts in an empty slot
    copies: tuple[int, int]  # batch entries and heads (or groups of heads) that each listed line stands for

    def places(self, like: Tensor, *shape: int) -> Tensor:
        """Allocate memory for the results of each part, (parts * copies, *shape) fp32."""
        return like.new_empty(self.parts.shape[0] * self.copies[0] * self.copies[1], *shape, dtype=torch.float32)

    def to(self, **places: Tensor) -> dict[str, Any]:
        """Return kernel arguments: the parts, and `places`, the memory for their results."""
        return {
            "p_parts": self.parts,
            **places,
            "num_parts": self.parts.shape[0],
            "limit": self.limit,
            "batch_copies": self.copies[0],
            "head_copies": self.copies[1],
            "HAS_PARTS": True,
        }


class Lines(NamedTuple):
    """The rows or columns that the programs of a pass over a layout process."""

    separate_heads: int  # batch entries times heads with separate lines
    number: int  # lines per head of the layout
    heads: int  # heads whose entries a line contains
    repeats: int  # how often a line repeats the entries of one head
    copies: tuple[int, int]  # batch entries and heads (or groups of heads) that each line stands for

    @classmethod
    def columns(cls, layout: BlockLayout, batch: int, q_heads: int, kv_heads: int) -> Lines:
        """Return the columns of a pass in which one program processes all heads of a group."""
        group_size, copies = q_heads // kv_heads, batch // layout.layout_batch
        if layout.layout_heads == 1:
            return cls(layout.layout_batch, layout.kv_blocks, 1, group_size, (copies, kv_heads))
        return cls(layout.layout_batch * kv_heads, layout.kv_blocks, group_size, 1, (copies, 1))

    @classmethod
    def rows(cls, layout: BlockLayout, batch: int, q_heads: int, heads: int) -> Lines:
        """Return the rows of a pass in which one program processes `heads` heads; 1 if the layout differs by head."""
        separate_heads = layout.layout_batch * layout.layout_heads
        copies = (batch // layout.layout_batch, q_heads // heads if layout.layout_heads == 1 else 1)
        return cls(separate_heads, layout.q_blocks, 1, 1, copies)

    def limit(self, entries: int, shares: int) -> int:
        """Return the largest number of entries of an unsplit line, for a layout with `entries` entries."""
        copies = self.copies[0] * self.copies[1]
        return longest_part(entries * self.repeats, self.separate_heads * self.number, copies, shares)

    def lists(self, counts: Tensor, limit: int) -> tuple[int, int]:
        """Return the numbers of parts and of split lines; `counts` holds the blocks of each line, on the host."""
        lengths = counts.long().flatten().view(self.separate_heads, self.heads, -1).sum(1) * self.repeats
        pieces = torch.where(lengths > limit, (lengths + limit - 1) // limit, 0)
        return int(pieces.sum()), int((pieces > 0).sum())


def longest_part(entries: int, lines: int, copies: int, shares: int) -> int:
    """Return the largest number of entries of an unsplit line: 1 / `shares` of all, >= 4 times the mean, >= 16.

    Rows under a causal mask, or with random blocks, stay below four times the mean and balance without a split. On an
    H200, a part of 16 blocks of 128 computes for about 30 us and takes 3 us to write its sums.
    """
    return max(16, -(-entries * copies // shares), -(-4 * entries // max(1, lines)))


def split_columns(layout: BlockLayout, batch: int, q_heads: int, kv_heads: int) -> SplitLines | None:
    """Return the split columns of a pass over kv blocks, with a group of heads per program; None if none is split.

    The host copy of the layout gives the number of parts. Without a host copy, as for a selection, the lists have their
    maximal length, a few parts per multiprocessor, so that nothing is read back from the GPU.
    """
    kept: dict[tuple[Any, ...], SplitLines | None] = _kept.of(layout)
    key = ("columns", batch, q_heads, kv_heads)
    if key not in kept:
        group_size = q_heads // kv_heads
        lines = Lines.columns(layout, batch, q_heads, kv_heads)
        entries = layout.kv_indices.numel()
        limit = lines.limit(entries, SHARE * processors(layout.device))
        sizes = 2 * entries * lines.repeats // limit, entries * lines.repeats // limit
        if limit >= layout.q_blocks * group_size:
            sizes = 0, 0
        elif layout.host is not None:
            sizes = lines.lists(layout.host.column_counts, limit)
        found = _split(layout.with_transposed(), True, lines, limit, *sizes) if sizes[1] else None
        if _captures(layout):
            return found
        kept[key] = found
    return kept[key]


def split_rows(layout: BlockLayout, batch: int, q_heads: int, share: int = SHARE, heads: int = 1) -> SplitLines | None:
    """Return the split rows of a pass over q blocks, with `heads` heads per program; None if none is split.

    Without a host copy of the layout, no row is split, because selections give all rows about equally many blocks.
    """
    if layout.host is None:
        return None
    kept: dict[tuple[Any, ...], SplitLines | None] = _kept.of(layout)
    key = ("rows", batch, q_heads, share, heads)
    if key not in kept:
        lines, found = Lines.rows(layout, batch, q_heads, heads), None
        entries = layout.kv_indices.numel()
        limit = lines.limit(entries, share * processors(layout.device))
        if limit < layout.kv_blocks:
            sizes = lines.lists(layout.host.kv_num_blocks, limit)
            found = _split(layout, False, lines, limit, *sizes) if sizes[1] else None
        if _captures(layout):
            return found
        kept[key] = found
    return kept[key]


def split_lists(layout: BlockLayout) -> tuple[Tensor, ...]:
    """Return all lists of split lines that are kept for a layout, which its kernels read."""
    return tuple(x for split in _kept.of(layout).values() if split is not None for x in (split.parts, split.lines))


def _captures(layout: BlockLayout) -> bool:
    """Return whether a CUDA graph is being captured; lists built now would be missing when it is replayed."""
    return layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_kept = PerLayout(by_form=False)  # the parts depend on the lengths of rows, which a form does not tell


@triton.jit
def _clear_slots(p_slots, used, size, BLOCK: tl.constexpr):
    """Mark the slots of a list after the used ones as empty."""
    for begin in range(used * 3, size * 3, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(p_slots + at, tl.zeros([BLOCK], tl.int32), mask=at < size * 3)


@kernel_launcher
@triton.jit(
    do_not_specialize=[
        "capacity",
        "separate_heads",
        "num_lines",
        "heads",
        "repeats",
        "limit",
        "most_parts",
        "most_lines",
    ]
)
def _list_parts_kernel(
    p_indptr,  # (separate_heads * heads, num_lines + 1)
    p_parts,
    p_lines,
    capacity,
    separate_heads,
    num_lines,
    heads,  # heads whose entries a line contains, one after another
    repeats,  # how often a line repeats the entries of one head
    limit,
    most_parts,
    most_lines,
    BLOCK: tl.constexpr,
):
    """Fill the lists of a `SplitLines` in one program; drop entries beyond the end of the lists."""
    parts_before, lines_before = 0, 0
    for begin in range(0, separate_heads * num_lines, BLOCK):
        line = begin + tl.arange(0, BLOCK)
        known = line < separate_heads * num_lines
        p_line = p_indptr + (line // num_lines).to(tl.int64) * heads * (num_lines + 1) + line % num_lines
        length = tl.zeros([BLOCK], tl.int32)
        for i_head in range(heads):
            start = tl.load(p_line + i_head * (num_lines + 1), mask=known, other=0)
            end = tl.load(p_line + i_head * (num_lines + 1) + 1, mask=known, other=0)
            start = tl.minimum(tl.maximum(start, 0), capacity)
            length += tl.minimum(tl.maximum(end, start), capacity) - start
        length *= repeats
        pieces = tl.where(length > limit, (length + limit - 1) // limit, 0)
        size = (length + pieces - 1) // tl.maximum(pieces, 1)
        is_split = (pieces > 0).to(tl.int32)
        first = parts_before + tl.cumsum(pieces, 0) - pieces
        place = lines_before + tl.cumsum(is_split, 0) - is_split
        p_entry, stored = p_lines + place * 3, (pieces > 0) & (place < most_lines)
        tl.store(p_entry, line, mask=stored)
        tl.store(p_entry + 1, first, mask=stored)
        tl.store(p_entry + 2, pieces, mask=stored)
        for i in range(tl.max(pieces, 0)):
            p_entry, stored = p_parts + (first + i) * 3, (i < pieces) & (first + i < most_parts)
            tl.store(p_entry, line, mask=stored)
            tl.store(p_entry + 1, i * size, mask=stored)
            tl.store(p_entry + 2, tl.minimum((i + 1) * size, length), mask=stored)
        parts_before += tl.sum(pieces, 0)
        lines_before += tl.sum(is_split, 0)
    _clear_slots(p_parts, parts_before, most_parts, BLOCK)
    _clear_slots(p_lines, lines_before, most_lines, BLOCK)


def _split(
    layout: BlockLayout, of_columns: bool, lines: Lines, limit: int, num_parts: int, num_lines: int
) -> SplitLines:
    """Build the lists in one allocation, each 16-byte aligned."""
    shapes = (num_parts, 3), (num_lines, 3)
    (lists,) = record_or_replay(_start_lists, layout, (), of_columns, lines, limit, shapes)
    parts, split_lines = dense_views(lists, shapes)
    return SplitLines(limit, parts, split_lines, lines.copies)


def _start_lists(
    layout: BlockLayout, of_columns: bool, lines: Lines, limit: int, shapes: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[Tensor]:
    lists = torch.empty(dense_size(shapes), dtype=torch.int32, device=layout.device)
    parts, split_lines = dense_views(lists, shapes)
    _list_parts_kernel[(1,)](
        (layout.transposed.q_indptr if of_columns else layout.kv_indptr).contiguous(),
        parts,
        split_lines,
        capacity=layout.kv_indices.numel(),
        separate_heads=lines.separate_heads,
        num_lines=lines.number,
        heads=lines.heads,
        repeats=lines.repeats,
        limit=limit,
        most_parts=shapes[0][0],
        most_lines=shapes[1][0],
        BLOCK=1024,
    )
    return (lists,)


def no_split(nothing: Tensor) -> dict[str, Any]:
    """Return the result of `SplitLines.to` for no split; `nothing` is an arbitrary tensor."""
    none = {"num_parts": 0, "limit": 0, "batch_copies": 1, "head_copies": 1, "HAS_PARTS": False}
    return {"p_parts": nothing, "p_sums": nothing, **none}


def split_programs(split: dict[str, Any]) -> int:
    """Return the number of programs for parts, which precede all others."""
    programs: int = split["num_parts"] * split["batch_copies"] * split["head_copies"]
    return programs
