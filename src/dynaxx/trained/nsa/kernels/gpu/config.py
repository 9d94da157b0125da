# SPDX-License-Identifier: Apache-2.0
"""Schedules and tile sizes of selected attention: pure functions of group size, slots, head_dim and dtype.

The values for head_dim up to 128 are the fastest ones found by `benchmarks/kernels/nsa_tiles.py` on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dynaxx.kernels.device import Gpu, padded

Schedule = Literal["union", "gather", "either"]  # by query, by key, or chosen on the GPU for each selection
UNION_WIDTH = 512  # slots of one tile's union that one program sorts
MAX_POSITIONS = 16  # query positions per tile; at most 32, the bits of a slot's set of positions
ITEM_ROWS = 8192  # rows of q in one item of a kernel by key
CHUNK_ITEM_ROWS = 1024  # the same if queries are processed in chunks: every query has an entry in the first block
GROUP_FOR_UNION = 16  # for smaller groups, the schedule by query reads too many keys per row
# "either" runs by query if unions hold at most this many blocks per position and slot. At 0.08, by query takes 3.4 ms
# and at 0.24 6.3 ms, where by key takes 4.9 ms (32/8 heads, 32k).
AGREE = 0.16


@dataclass(frozen=True)
class QueryTiles:
    """Tile sizes for a program of the schedule by query."""

    positions: int  # neighbouring query positions
    group: int  # rows per position: the group size as a power of two
    rows: int  # rows per tile; a matrix instruction needs at least 16
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class KeyTiles:
    """Tile sizes for a program of the schedule by key: one block of keys, and `rows` gathered rows of q per step."""

    group: int
    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def group_rows(group_size: int) -> int:
    """Return the smallest power of two >= the group size."""
    return 1 << (group_size - 1).bit_length()


def query_tiles(
    group_size: int, slots: int, head_dim: int, head_dim_v: int, dtype: torch.dtype, gpu: Gpu
) -> QueryTiles:
    """Return tiles of 64 rows for bf16 and fp16, or fewer if the union would have too many slots; fewer for fp32."""
    wide = max(padded(head_dim), padded(head_dim_v))
    group, exact = group_rows(group_size), dtype == torch.float32
    positions = max(1, min(MAX_POSITIONS, (16 if exact else 64) // group))
    while positions > 1 and positions * slots > UNION_WIDTH:
        positions //= 2
    rows = max(16, positions * group)
    block_n = 32 if exact or wide > 128 else 64
    stages = 1 if exact or wide > 128 else min(3, gpu.shared_memory // (4 * block_n * wide))  # of k and v in 16 bits
    return QueryTiles(positions, group, rows, block_n, 4 if rows <= 64 else 8, stages)


def forward_key_tiles(group_size: int, dtype: torch.dtype) -> KeyTiles:
    """Return tile sizes for the partial outputs by key."""
    group = group_rows(group_size)
    if dtype == torch.float32:
        return KeyTiles(group, max(16, group), 32, 4, 1)
    return KeyTiles(group, max(64, group), 128, 4, 1)


def backward_key_tiles(group_size: int, head_dim: int, head_dim_v: int, dtype: torch.dtype, gpu: Gpu) -> KeyTiles:
    """Return tile sizes for dk and dv by key, which stay in registers; eight warps take twice as long as four.

    Without instructions of whole warpgroups, 64 rows spill 576 to 6,304 bytes and 32 rows none.
    """
    wide = max(padded(head_dim), padded(head_dim_v))
    group = group_rows(group_size)
    if dtype == torch.float32:
        return KeyTiles(group, max(16, group), 16, 4, 1)
    if wide <= 128:
        rows = 64 if gpu.multiplies_by_warpgroup else 32
        return KeyTiles(group, max(rows, group), 64, 4, 3 if group_size >= GROUP_FOR_UNION else 2)
    return KeyTiles(group, max(32, group), 32, 8, 1)


def score_tiles(per_block: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return compressed tokens per program of the score kernel (a multiple of a block), its warps and its stages."""
    return (max(per_block, 16), 4, 1) if dtype == torch.float32 else (max(per_block, 64), 8, 3)


def top_warps(width: int) -> int:
    """Return warps of the top-k kernel for rows of `width` scores; sums within one warp need no barrier."""
    return 1 if width <= 1024 else 4


def item_length(group_size: int, chunked: bool) -> int:
    """Return the largest number of entries in one item."""
    return max(64, (CHUNK_ITEM_ROWS if chunked else ITEM_ROWS) // group_rows(group_size))


def choose_schedule(group_size: int) -> Schedule:
    """Return "union" (by query) if the group of one position fills a matrix instruction, else "gather" (by key)."""
    return "union" if group_size >= GROUP_FOR_UNION else "gather"
