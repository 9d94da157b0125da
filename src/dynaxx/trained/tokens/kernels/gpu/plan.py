# SPDX-License-Identifier: Apache-2.0
"""`TokenPlan`: a selection on its device, as lists of tiles of queries.

T queries, Hs selection heads, n slots. A list of a tile holds the blocks of all its queries, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.device import gpu_of, power_of_two, processors
from dynaxx.kernels.runtime.arguments import packed_strides_of
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.host import on_host
from dynaxx.trained.tokens.kernels.gpu.config import TileRows, tile_rows, widths
from dynaxx.trained.tokens.kernels.gpu.primitives import ListTables
from dynaxx.trained.tokens.kernels.gpu.unions import _token_union_kernel
from dynaxx.trained.tokens.spans import TokenSpans

TABLES, WARPS = 4, 8  # programs per multiprocessor that build lists, and their warps
TABLE_BYTES = 256 << 20
Unions = Callable[[Tensor, TokenSpans, int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class ListRooms(NamedTuple):
    """The most entries that lists of tiles can have, added up. Calls share the tensor, so nothing may write to it."""

    before: tuple[int, ...]  # (tiles + 1,) entries of all tiles before each tile
    on_device: Tensor  # the same, int64


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
    rooms: ListRooms | None  # None: every list may fill its slots


def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> TokenPlan:
    """Return the plan that forward and backward share. Numbers may be in any order; those out of range are not read."""
    units = max(block_indices.shape[1], k.shape[1])
    rows = tile_rows(q.shape[1] // units, max(q.shape[2], v.shape[2]), q.itemsize, gpu_of(q.device))
    return prepare_rows(block_indices, spans, q, k, rows)


def prepare_rows(
    block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, rows: TileRows, unions: Unions | None = None
) -> TokenPlan:
    """Return the plan of tiles with these rows, by a function that makes lists like those of `unions.py`."""
    units = max(block_indices.shape[1], k.shape[1])
    chosen = block_indices.contiguous()
    tiles, position, first_key = query_places(spans, rows.per_tile, q.device)
    lists, marks, counts = chosen, chosen, None
    if rows.per_tile > 1:
        lists, marks, counts = (unions or _unions)(chosen, spans, rows.per_tile, tiles, position)
    return TokenPlan(lists, marks, counts, tiles, position, first_key, spans.block_size, units, rows, None)


class QueryPlaces(NamedTuple):
    """The positions of queries, on a device. Calls share them, so nothing may write to them."""

    tiles: Tensor  # (tiles, 2) int32: first query, number of queries
    position: Tensor  # (T,) int32, of each query among the keys of its sequence
    first_key: Tensor  # (T,) int32, row of the first key of its sequence


@LayoutCache
@on_host
def query_places(spans: TokenSpans, per_tile: int, device: torch.device) -> QueryPlaces:
    """Return the places of queries in tiles of `per_tile`."""
    place = lambda x: x.to(torch.int32).to(device, non_blocking=True)
    with torch.inference_mode(False):  # cached tensors must also be usable in training
        return QueryPlaces(place(query_tiles(spans, per_tile)), place(spans.position), place(spans.first_key))


@on_host
def query_tiles(spans: TokenSpans, per_tile: int) -> Tensor:
    """Return (tiles, 2) on the CPU: first query and number of queries; a tile ends with its sequence."""
    parts = []
    for start, stop in pairwise(spans.ends_q):
        first = torch.arange(start, stop, per_tile)
        parts.append(torch.stack([first, (stop - first).clamp(max=per_tile)], 1))
    return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)


@LayoutCache
@on_host
def list_rooms(spans: TokenSpans, per_tile: int, slots: int, device: torch.device) -> ListRooms:
    """Return the most blocks that the queries of each tile can choose: all that they see, or `slots` each."""
    tiles = query_tiles(spans, per_tile)
    seen = (spans.position[tiles.sum(1) - 1] // spans.block_size + 1).clamp(min=0)
    before = torch.nn.functional.pad(torch.minimum(seen, tiles[:, 1] * slots).cumsum(0), (1, 0))
    with torch.inference_mode(False):
        return ListRooms(tuple(before.tolist()), before.to(device, non_blocking=True))


def empty_lists(
    chosen: Tensor, spans: TokenSpans, per_tile: int, tiles: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for lists that hold whatever the queries of a tile choose, for marks and for counts."""
    heads, slots = chosen.shape[1:]
    lists = chosen.new_empty(len(tiles), heads, max(1, min(per_tile * slots, _blocks(spans))))
    marks = torch.empty_like(lists, dtype={8: torch.int8, 16: torch.int16, 32: torch.int32}[bits])
    return lists, marks, chosen.new_empty(len(tiles), heads)


def _blocks(spans: TokenSpans) -> int:
    """Return the number of blocks of the longest sequence."""
    return max((-(-(d - c) // spans.block_size) for c, d in pairwise(spans.ends_k)), default=0)


def _unions(
    chosen: Tensor, spans: TokenSpans, per_tile: int, tiles: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, slots = chosen.shape[1:]
    bits = 8 if per_tile <= 8 else 16 if per_tile <= 16 else 32
    lists, marks, counts = empty_lists(chosen, spans, per_tile, tiles, bits)
    count = len(tiles) * heads
    if not count:
        return lists, marks, counts
    columns = max(1, _blocks(spans))
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
        capacity=lists.shape[2],
        GRAIN=spans.block_size,
        BLOCK_S=min(2048, power_of_two(max(16, slots))),
        BLOCK_W=min(2048, power_of_two(max(16, columns))),
        num_warps=WARPS,
    )
    return lists, marks, counts


def shares_rows(k: Tensor, v: Tensor) -> bool:
    """Return whether values are the first part of the keys, in the same memory, as in latent attention (MLA)."""
    same = k.data_ptr() == v.data_ptr() and k.dtype == v.dtype and same_rows(k, v)
    return same and k.shape[2] > v.shape[2] and v.shape[2] == widths(k.shape[2])[0] == widths(v.shape[2])[0]


def same_rows(k: Tensor, v: Tensor) -> bool:
    """Return whether k and v have equal strides; the stride of a dimension of length 1 does not matter."""
    return k.shape[:-1] == v.shape[:-1] and all(
        a == b or size == 1 for a, b, size in zip(k.stride(), v.stride(), v.shape, strict=True)
    )


def shared_arguments(
    q: Tensor, k: Tensor, v: Tensor, plan: TokenPlan, scale: float, softcap: float | None
) -> dict[str, Any]:
    """Return the arguments that kernels by tile of queries share."""
    (d_a, d_b), (e_a, e_b) = widths(q.shape[2]), widths(v.shape[2])
    counts = plan.lists if plan.counts is None else plan.counts
    return {
        "lists": ListTables(plan.lists, plan.marks, counts, plan.tiles, plan.position, plan.first_key),
        "queries": q.shape[0],
        "units": plan.units,
        "select_heads": plan.lists.shape[1],
        "kv_heads": k.shape[1],
        "slots": plan.lists.shape[2],
        "group_size": q.shape[1] // plan.units,
        "scale": scale,
        "softcap": softcap or 1.0,
        "q_strides": packed_strides_of(q),
        "k_strides": packed_strides_of(k),
        "v_strides": packed_strides_of(v),
        "D": q.shape[2],
        "E": v.shape[2],
        "D_A": d_a,
        "D_B": d_b,
        "E_A": e_a,
        "E_B": e_b,
        "GRAIN": plan.block_size,
        "PER_TILE": plan.rows.per_tile,
        "PART": plan.rows.part,
        "ROWS": plan.rows.rows,
        "CAPPED": softcap is not None,
        "EXACT": q.dtype == torch.float32,
    }
