# SPDX-License-Identifier: Apache-2.0
"""Build the layout of a pattern from its runs of blocks and from the element masks of its partial blocks."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.core.library import present_library
from dynaxx.core.structures import raise_for_status
from dynaxx.layout import EMPTY, FULL, BlockGrid, BlockLayout, ElementMasks
from dynaxx.layout.host import address, dense_views, never_traced, on_device
from dynaxx.layout.host_metadata import attach
from dynaxx.layout.masks import bands_of
from dynaxx.patterns.kinds import Blocks, Kinds, Words, element_masks
from dynaxx.patterns.runs import Ints, Runs, Visited, checked_visited, concatenated, without


class Rule(Protocol):
    """A pattern; `Pattern` documents the methods."""

    @property
    def by_distance(self) -> bool:
        """Return whether the visibility of a pair depends only on the distance from key to query."""

    def within_causality(self, grid: BlockGrid) -> Rule:
        """Return this rule without the pairs that a causal grid hides."""

    def program(self, grid: BlockGrid) -> list[int] | None:
        """Return this rule as numbers for the compiled core."""

    def visited(self, grid: BlockGrid) -> Visited:
        """Return runs of blocks that hold every visible pair."""

    def kinds(self, blocks: Blocks) -> Kinds:
        """Return the element masks of some blocks."""


@never_traced
def layout_tensors(rule: Rule, grid: BlockGrid, device: torch.device) -> list[Tensor] | None:
    """Build the tensors of a layout, in the order that `build.on_device` lists them.

    Return None if the core is missing, if the rule has no `program` or one that the core does not know, or if memory
    is short.
    """
    program = rule.program(grid)
    library = present_library() if program else None
    if library is None or program is None:
        return None
    sizes, built = (c_int64 * 7)(), c_void_p()
    lengths = (c_int64 * 5)(grid.seqlen_q, grid.seqlen_k, *grid.block_size, grid.causal)
    numbers = (c_int64 * len(program))(*program)
    if library.dynaxx_cpu_static_layout(numbers, len(program), lengths, sizes, byref(built)):
        return None
    try:
        total = sum(size + -size % 4 for size in sizes)
        found = torch.empty(total, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    except BaseException:
        library.dynaxx_cpu_take_layout(built, None, 0)
        raise
    raise_for_status(library.dynaxx_cpu_take_layout(built, address(found, torch.int32, (total,)), total))
    rows, masks = grid.q_blocks, sizes[5] // 2
    shapes = [
        (1, 1, rows + 1),
        (1, 1, rows),
        (sizes[2],),
        (sizes[3],),
        (masks, grid.block_size[0], -(-grid.block_size[1] // 32)),
        (masks, 2),
        (1, 1, rows),  # the order of rows, if there is one
    ]
    return dense_views(found.to(device, non_blocking=device.type == "cuda"), shapes if sizes[6] else shapes[:6])


class VisitedEntries(NamedTuple):
    """The visited blocks row by row. Each row lists its partial blocks and then its full ones, each ascending."""

    num_partial: Ints  # (q_blocks,) partial blocks of each row
    num_blocks: Ints  # (q_blocks,) blocks of each row
    indices: NDArray[Any]  # (nnz,) kv blocks
    mask_ids: NDArray[Any]  # (nnz,) index into the table of masks, or FULL


def build_layout(pattern: Rule, grid: BlockGrid, device: torch.device | str = "cpu") -> BlockLayout:
    """Return the layout of `pattern` on `grid`, shared by all heads."""
    device = torch.device(device)
    rule = pattern.within_causality(grid)
    compiled = layout_tensors(rule, grid, device) if grid.q_blocks and grid.kv_blocks else None
    if compiled is None:
        return numpy_layout(rule, grid, device)
    layout = _of_tensors(grid, compiled)
    if device.type != "cpu":
        attach(layout, partial(build_layout, rule, grid), layout.kv_order)
    return layout


def numpy_layout(rule: Rule, grid: BlockGrid, device: torch.device) -> BlockLayout:
    """Return the layout of a rule without the compiled core. The rule must hide the future if the grid is causal."""
    if rule.by_distance and grid.q_blocks and grid.kv_blocks:
        return _layout(grid, *_entries_by_distance(rule, grid), device)
    touched, filled = Runs.none(), Runs.none()
    if grid.q_blocks and grid.kv_blocks:
        touched, filled = checked_visited(rule, grid.q_blocks, rule.visited(grid))
    partial = without(touched, filled)
    rows, cols = partial.blocks(grid.q_blocks)
    bits, mask_ids = np.zeros((0, grid.block_size[0], -(-grid.block_size[1] // 32)), np.int32), rows
    if len(rows):
        bits, mask_ids = element_masks(rule.kinds(Blocks(grid, rows, cols)), grid.block_size)
    if (mask_ids >= 0).all():
        return _layout(grid, _entries_of_runs(grid, partial, filled, rows, mask_ids), bits, device)
    entries = _sorted_entries(grid, (rows, cols, mask_ids), filled.blocks(grid.q_blocks))
    return _layout(grid, entries, bits, device)


def _entries_by_distance(rule: Rule, grid: BlockGrid) -> tuple[VisitedEntries, Words]:
    """Return the entries and mask bits of a rule on distances, which shows the same distances in each row."""
    step = min(grid.block_size)
    up, down = (size // step for size in grid.block_size)  # steps between neighbouring rows, and between columns
    rows = np.arange(grid.q_blocks) * up
    far = grid.kv_blocks * down
    most, least = int(rows[-1]), -far
    if grid.causal:
        least = max(least, -(grid.offset // step) - up - 1)  # smaller distances are in the future of every row
    apart = np.arange(most, least, -1)
    bits, mask_ids = element_masks(rule.kinds(Blocks.at(grid, apart)), grid.block_size)
    start, end = np.zeros((2, 2, grid.q_blocks), np.int64)
    places, done = [], 0
    for part, chosen in enumerate((mask_ids >= 0, mask_ids == FULL)):
        for phase in range(down):  # a row of this phase meets the columns at every `down`-th distance
            shown = (chosen & (apart % down == phase) if down > 1 else chosen).nonzero()[0]
            of = slice(phase, None, down)
            start[part, of] = shown.searchsorted(most - rows[of]) + done
            end[part, of] = shown.searchsorted(most + far - rows[of]) + done
            places.append(shown)
            done += len(shown)
    num_partial, num_full = end - start
    place = np.concatenate(places).take(Runs(start, end).columns(grid.q_blocks))
    cols = rows.astype(np.int32).repeat(num_partial + num_full)
    cols -= apart.astype(np.int32).take(place)
    of_entries = mask_ids.astype(np.int32).take(place)
    return VisitedEntries(num_partial, num_partial + num_full, cols if down == 1 else cols // down, of_entries), bits


def _entries_of_runs(grid: BlockGrid, partial: Runs, filled: Runs, rows: Ints, mask_ids: Ints) -> VisitedEntries:
    """Return entries from runs that are in order. `mask_ids` are those of the partial blocks, which lie in `rows`."""
    num_partial, num_full = partial.lengths(grid.q_blocks), filled.lengths(grid.q_blocks)
    indices = concatenated(partial, filled).columns(grid.q_blocks)
    entry_mask_ids = np.empty(len(indices), np.int32)
    entry_mask_ids.fill(FULL)
    before = num_full.cumsum() - num_full
    entry_mask_ids[before.take(rows) + np.arange(len(rows))] = mask_ids
    return VisitedEntries(num_partial, num_partial + num_full, indices, entry_mask_ids)


def assembled_layout(
    grid: BlockGrid, listed: tuple[NDArray[Any], ...], filled: tuple[NDArray[Any], ...], bits: Words
) -> BlockLayout:
    """Return the layout of some blocks on the host, as `_sorted_entries` takes them, with their table of masks."""
    return _layout(grid, _sorted_entries(grid, listed, filled), bits, torch.device("cpu"))


def _sorted_entries(
    grid: BlockGrid, listed: tuple[NDArray[Any], ...], filled: tuple[NDArray[Any], ...]
) -> VisitedEntries:
    """Return entries in order after some of the touched blocks have turned out to be full or empty.

    Args:
        grid: the grid of blocks.
        listed: rows, kv blocks and mask ids of the blocks that were listed as partial.
        filled: rows and kv blocks of the full ones.
    """
    rows, cols = (np.concatenate(both) for both in zip(listed, filled, strict=False))
    mask_ids = np.concatenate([listed[2], np.full(len(filled[0]), FULL)])
    kept = mask_ids != EMPTY
    rows, cols, mask_ids = rows[kept], cols[kept], mask_ids[kept]
    parts = rows * 2 + (mask_ids == FULL)
    order = (parts * max(1, grid.kv_blocks) + cols).argsort(kind="stable")
    counts = np.bincount(parts, minlength=2 * grid.q_blocks).reshape(-1, 2)
    return VisitedEntries(counts[:, 0], counts.sum(1), cols[order], mask_ids[order])


def _layout(grid: BlockGrid, entries: VisitedEntries, bits: Words, device: torch.device) -> BlockLayout:
    """Return the layout of some entries. The order of its rows is computed here, where the host has their lengths."""
    num_blocks = entries.num_blocks
    indptr = np.zeros((1, 1, grid.q_blocks + 1), np.int64)
    num_blocks.cumsum(out=indptr[0, 0, 1:])
    arrays: list[NDArray[Any]] = [indptr, entries.num_partial[None, None], entries.indices, entries.mask_ids]
    arrays += [bits, bands_of(bits, grid.block_size[1])]
    if (num_blocks[1:] < num_blocks[:-1]).any():  # else the last rows are the longest
        arrays.append((-num_blocks).argsort(kind="stable")[None, None])
    layout = _assembled(grid, arrays, device)
    if device.type != "cpu":
        attach(layout, partial(_assembled, grid, arrays, torch.device("cpu")), layout.kv_order)
    return layout


def _assembled(grid: BlockGrid, arrays: list[NDArray[Any]], device: torch.device) -> BlockLayout:
    return _of_tensors(grid, on_device(arrays, device))


def _of_tensors(grid: BlockGrid, tensors: list[Tensor]) -> BlockLayout:
    """Return the layout of the tensors that `_layout` lists. The last one, the order of rows, may be missing."""
    layout = BlockLayout(
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.seqlen_k,
        block_size=grid.block_size,
        kv_indptr=tensors[0],
        kv_num_partial=tensors[1],
        kv_indices=tensors[2],
        kv_masks=tensors[3],
        masks=ElementMasks(tensors[4], tensors[5], grid.block_size[1]),
    )
    layout.derived.kv_order, layout.derived.nnz = tensors[6] if len(tensors) > 6 else None, tensors[2].numel()
    return layout
