# SPDX-License-Identifier: Apache-2.0
"""Tile sizes: pure functions of shapes, dtype and the GPU's description, unless `dynaxx.autotune` was run.

The sizes for Hopper with head_dim up to 128 are the fastest ones found by `benchmarks/kernels/gpu_tiles.py` on an
H200. Other GPUs were not measured: `unmeasured_tiles` has the largest tiles whose registers a compiler does not spill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from typing import Any, Literal

import torch

from dynaxx.kernels.attention.triton.tuned_tiles import kind_of_launch, tuned_values
from dynaxx.kernels.attention.triton.unmeasured_tiles import unmeasured_tiles
from dynaxx.kernels.device import Gpu, padded

SPAN = 16  # tiles of a head that start in succession, before those of the next head
WHOLE_HEAD = 1 << 20
TMA_BLOCK = 64  # tokens; smaller blocks are gathered by addresses, which TMA does not support

Loop = Literal["in turn", "ahead", "overlapped"]


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes of a kernel: `block_m` queries by `block_n` keys per step, and Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, if limiting them allows one more program per multiprocessor


def tunable(choose: Callable[..., TileSizes]) -> Callable[..., TileSizes]:
    """Let the results of `dynaxx.autotune` for this device replace what the function chooses."""

    @lru_cache(maxsize=1024)
    @wraps(choose)
    def chosen(gpu: Gpu, *shape: Any) -> TileSizes:
        values = tuned_values(kind_of_launch(choose.__name__, *shape), gpu)
        if values is None and not gpu.has_wgmma:
            values = unmeasured_tiles(gpu, choose.__name__, *shape)
        return choose(gpu, *shape) if values is None else TileSizes(*values)  # type: ignore[arg-type]

    return chosen


@tunable
def forward_tiles(
    gpu: Gpu, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: tuple[int, int], tma: bool
) -> TileSizes:
    """Return tile sizes for the forward kernel, which keeps q resident and streams k and v."""
    wide = max(padded(head_dim), padded(head_dim_v))
    if dtype == torch.float32:  # no matrix unit computes exact fp32, so tiles live in registers
        tiles = TileSizes(32 if wide <= 64 else 16, 32, 4, 1)
    elif tma and wide <= 64:
        tiles = TileSizes(128, 128, 4, 2, 255) if min(block_size) >= 128 else TileSizes(64, 64, 4, 2, 128)
    elif wide > 256 and tma and padded(head_dim_v) <= 256 and block_size[0] >= 128:
        tiles = TileSizes(128, 64, 8, 1)  # 3.41 ms; 3.70 with 32 keys, two stages and the order "ahead"
    elif wide > 256:  # sums of 64 queries fill half of the registers of eight warps
        tiles = TileSizes(64, 32, 8, 2)
    elif tma:
        tiles = TileSizes(128, 64, 8, 2, 128) if wide <= 128 else TileSizes(128, 64, 8, 2)
    elif wide <= 64:
        tiles = TileSizes(128, 128, 8, 3)
    else:
        tiles = TileSizes(64, 64, 4, 2) if wide <= 128 else TileSizes(64, 64, 8, 2)
    stay, move = padded(head_dim), padded(head_dim) + padded(head_dim_v)
    return _fit(tiles, block_size, dtype, stay, move, gpu.shared_memory, tma)


def forward_loop(gpu: Gpu, tiles: TileSizes, head_dim: int, head_dim_v: int, tma: bool) -> Loop:
    """Return the order of products (see `forward_row`); few warps per multiprocessor must each overlap their own work.

    Only Hopper's products run while the warp continues. Above 256 columns of v, sums and scores of two tiles would not
    fit into registers.
    """
    if not tma or not gpu.has_wgmma or (max(padded(head_dim), padded(head_dim_v)) > 256 and tiles.block_m < 128):
        return "in turn"
    return "ahead" if tiles.max_registers else "overlapped"


def value_parts(head_dim_v: int, block_size: tuple[int, int], tma: bool) -> int:
    """Return how many programs of the forward share a tile, each with its columns of v.

    Above 256 columns, the sums of 64 queries fill the registers. Two programs with half of the columns compute all
    scores twice, but have 128 queries each, so that they read keys and values half as often.
    """
    return 2 if tma and block_size[0] >= 128 and padded(head_dim_v) > 256 and head_dim_v % 16 == 0 else 1


@tunable
def backward_dq_tiles(
    gpu: Gpu, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: tuple[int, int], tma: bool
) -> TileSizes:
    """Return tile sizes for the dq kernel, which keeps q and do resident and streams k and v."""
    wide = max(padded(head_dim), padded(head_dim_v))
    if dtype == torch.float32:
        tiles = TileSizes(32 if wide <= 64 else 16, 32, 4, 1)
    elif tma and wide <= 64:
        tiles = TileSizes(64, 64, 4, 3, 168)  # three programs per multiprocessor
    elif tma and wide <= 128:
        tiles = TileSizes(64, 64, 4, 3)  # two programs, because q and do are in registers
    elif wide > 256:
        tiles = TileSizes(64, 32, 8, 1)  # tiles of 16 keys give wrong sums of dq
    elif tma:
        tiles = TileSizes(128, 32, 8, 2)
    else:
        tiles = TileSizes(64, 64, 4, 2) if wide <= 128 else TileSizes(64, 32, 8, 1)
    both = padded(head_dim) + padded(head_dim_v)
    return _fit(tiles, block_size, dtype, both, both, gpu.shared_memory, tma)


@tunable
def backward_dkv_tiles(
    gpu: Gpu, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: tuple[int, int], tma: bool
) -> TileSizes:
    """Return tile sizes for the dkv kernel, which keeps k and v resident and streams q and do."""
    wide = max(padded(head_dim), padded(head_dim_v))
    if dtype == torch.float32:
        tiles = TileSizes(32, 32 if wide <= 64 else 16, 4, 1)
    elif tma and wide <= 128:
        tiles = TileSizes(64, 64, 4, 3 if wide <= 64 else 2)
    elif wide > 256:  # for dk alone, see `dkv_apart`
        tiles = TileSizes(32, 64, 8, 1)
    elif tma:
        tiles = TileSizes(64, 64, 8, 1)
    else:
        tiles = TileSizes(32, 64, 4, 3) if wide <= 128 else TileSizes(32, 64, 8, 1)
    both = padded(head_dim) + padded(head_dim_v)
    return _fit_turned(tiles, block_size, dtype, both, both, gpu.shared_memory, tma)


@tunable
def backward_dv_tiles(
    gpu: Gpu, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: tuple[int, int], tma: bool
) -> TileSizes:
    """Return tile sizes for the dkv kernel if it computes only dv; it keeps k resident and streams q and do."""
    tiles = TileSizes(32, 16, 4, 1) if dtype == torch.float32 else TileSizes(32, 64, 8, 2)
    both = padded(head_dim) + padded(head_dim_v)
    return _fit_turned(tiles, block_size, dtype, padded(head_dim), both, gpu.shared_memory, tma)


def dkv_apart(head_dim: int, head_dim_v: int) -> bool:
    """Return whether dk and dv need one launch each, because registers cannot hold the sums of both."""
    return max(padded(head_dim), padded(head_dim_v)) > 256


def _fit_turned(
    tiles: TileSizes, block_size: tuple[int, int], dtype: torch.dtype, stay: int, move: int, limit: int, tma: bool
) -> TileSizes:
    """Apply `_fit` for kernels that keep `block_n` rows resident and stream `block_m` rows."""
    turned = replace(tiles, block_m=tiles.block_n, block_n=tiles.block_m)
    turned = _fit(turned, block_size[::-1], dtype, stay, move, limit, tma)
    return replace(turned, block_m=turned.block_n, block_n=turned.block_m)


def _fit(
    tiles: TileSizes, block_size: tuple[int, int], dtype: torch.dtype, stay: int, move: int, limit: int, tma: bool
) -> TileSizes:
    """Shrink tiles to the layout's blocks and to shared memory.

    `block_m` rows of `stay` elements are resident; `block_n` rows of `move` elements stream. The resulting `block_m`
    divides its block; `block_n` divides its block, or is a multiple of it that gathers several blocks.
    """
    asked = tiles
    tiles = replace(
        tiles, block_m=min(tiles.block_m, block_size[0]), block_n=min(tiles.block_n, max(block_size[1], 64))
    )
    wide = (tma and stay >= 512 and tiles == asked) or move > 512  # sums need the registers of eight warps
    if tiles.block_m * tiles.block_n <= 64 * 64 and not wide:
        tiles = replace(tiles, num_warps=4, max_registers=tiles.max_registers if tiles == asked else None)
    while (tiles.block_m * stay + tiles.num_stages * tiles.block_n * move) * dtype.itemsize > limit:
        if tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.block_m > 16:
            tiles = replace(tiles, block_m=tiles.block_m // 2)
        else:
            break
    return tiles


def dq_from_registers(gpu: Gpu, tiles: TileSizes, head_dim: int, head_dim_v: int, tma: bool) -> bool:
    """Return whether the dq kernel holds q and do in registers; two programs of four warps per multiprocessor can."""
    wide = max(padded(head_dim), padded(head_dim_v))
    return tma and tiles.num_warps == 4 and wide == 128 and gpu.has_wgmma


def dkv_in_stages(gpu: Gpu, tiles: TileSizes, head_dim: int, head_dim_v: int, tma: bool) -> bool:
    """Return whether the dkv kernel has three buffers for q and two for do.

    Two programs per Hopper multiprocessor have enough memory for that; with two buffers each, every tile waits for its
    load.
    """
    wide = max(padded(head_dim), padded(head_dim_v))
    fits = (tiles.num_warps, tiles.num_stages) == (4, 2) and max(tiles.block_m, tiles.block_n) <= 64
    return tma and fits and wide == 128 and gpu.has_wgmma


def query_span(group_size: int) -> int:
    """Return how many tiles of a q head start in succession, for forward and dq, before those of the next head.

    Without shared keys, processing one head after another reads keys from L2: forward 2.03 ms instead of 2.16, dq 2.72
    instead of 3.26 (random 10 %).
    """
    return WHOLE_HEAD if group_size == 1 else SPAN


def forward_span(group_size: int, tiles: TileSizes) -> int:
    """Return `query_span` for the forward.

    Its largest tiles read so few keys that these come from L2 in any order, and one head after another takes less
    power: 1.19 ms instead of 1.24 (head_dim 64, random 10 %).
    """
    return 16 * SPAN if group_size > 1 and tiles.max_registers == 255 else query_span(group_size)


def dkv_span(tiles: int, processors: int) -> int:
    """Return `query_span` for dk and dv, for a kv head with `tiles` tiles.

    One head after another reads queries from L2, but the short columns of the last head must fill all multiprocessors.
    """
    return WHOLE_HEAD if tiles > 2 * processors else 4 * SPAN
