# SPDX-License-Identifier: Apache-2.0
"""`TokenPlan`: a selection on its device, as lists of tiles of queries.

T queries, Hs selection heads, n slots. A list of a tile holds the blocks of all its queries, each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dynaxx.kernels.gpu.device import power_of_two, processors
from dynaxx.kernels.gpu.tokens.config import TileRows, tile_rows
from dynaxx.kernels.gpu.tokens.unions import _token_union_kernel
from dynaxx.layout.host import on_host
from dynaxx.layout.tokens import TokenSpans

TABLES, WARPS = 4, 8  # programs per multiprocessor that build lists, and their warps
TABLE_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenPlan:
    """The selection, in the form that forward and backward read."""

    lists: Tensor  # (tiles, Hs, slots) int32 contiguous; -1 or anything behind `counts` for an empty slot
    marks: Tensor  # (tiles, Hs, slots), bit i for query i of the tile; `lists` where a tile is one query
    counts: Tensor | None  # (tiles, Hs) int32; None where a tile is one query
    tiles: Tensor  # (tiles, 2) int32: first query, number of queries
    position: Tensor  # (T,) int32
    first_key: Tensor  # (T,) int32
    block_size: int
    units: int  # groups of q heads that share a kv head and a list
    rows: TileRows


def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
    """Return the plan that forward and backward share. Numbers may be in any order; those out of range are not read."""
    units = max(block_indices.shape[1], k.shape[1])
    rows = tile_rows(q.shape[1] // units, max(q.shape[2], v.shape[2]), q.itemsize)
    return prepare_rows(block_indices, spans, q, k, rows)


def prepare_rows(
    block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, rows: TileRows, bits: int = 8
) -> TokenPlan:
    """Return the plan of tiles with these rows; marks have at least so many bits."""
    place = lambda x: x.to(torch.int32).to(q.device, non_blocking=True)
    units = max(block_indices.shape[1], k.shape[1])
    chosen, position, tiles = (
        block_indices.contiguous(),
        place(spans.position),
        place(query_tiles(spans, rows.per_tile)),
    )
    lists, marks, counts = chosen, chosen, None
    if rows.per_tile > 1:
        lists, marks, counts = _unions(chosen, spans, rows.per_tile, bits, tiles, position)
    first_key = place(spans.first_key)
    return TokenPlan(lists, marks, counts, tiles, position, first_key, spans.block_size, units, rows)


@on_host
def query_tiles(spans: TokenSpans, per_tile: int) -> Tensor:
    """Return (tiles, 2) on the CPU: first query and number of queries; a tile ends with its sequence."""
    parts = []
    for start, stop in pairwise(spans.ends_q):
        first = torch.arange(start, stop, per_tile)
        parts.append(torch.stack([first, (stop - first).clamp(max=per_tile)], 1))
    return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)


def _unions(
    chosen: Tensor, spans: TokenSpans, per_tile: int, bits: int, tiles: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, slots = chosen.shape[1:]
    blocks = max((-(-(d - c) // spans.block_size) for c, d in pairwise(spans.ends_k)), default=0)
    capacity = max(1, min(per_tile * slots, blocks))
    lists = chosen.new_empty(len(tiles), heads, capacity)
    bits = max(bits, 8 if per_tile <= 8 else 16 if per_tile <= 16 else 32)
    marks = torch.empty_like(lists, dtype={8: torch.int8, 16: torch.int16, 32: torch.int32}[bits])
    counts = chosen.new_empty(len(tiles), heads)
    count = len(tiles) * heads
    if not count:
        return lists, marks, counts
    columns = max(1, blocks)
    programs = max(1, min(count, TABLES * processors(chosen.device), TABLE_BYTES * 8 // (bits * columns)))
    _token_union_kernel[(programs,)](
        chosen,
        tiles,
        position,
        marks.new_zeros(programs, columns),
        lists,
        marks,
        counts,
        lists=count,
        heads=heads,
        slots=slots,
        blocks=columns,
        capacity=capacity,
        GRAIN=spans.block_size,
        BLOCK_S=min(2048, power_of_two(max(16, slots))),
        BLOCK_W=min(2048, power_of_two(max(16, columns))),
        num_warps=WARPS,
    )
    return lists, marks, counts
