# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiles and numbers of programs of a decoding step: pure functions of the cache and the device."""

from typing import NamedTuple

import torch

from dynaxx.kernels.device import Gpu, gpu_of, padded
from dynaxx.layout.paging import PagedCache

KEYS_PER_TILE = 64
NUM_WARPS, TILES_AHEAD = 4, 2
KEYS_PER_WARP = 16  # of a tile that is one small page
PROGRAMS_PER_PROCESSOR = 2
CROWDED_PROGRAMS = 4  # per multiprocessor, for 8-bit caches, where arithmetic dominates, and for small pages
CROWDED_REGISTERS = 128  # per thread, so that a multiprocessor holds as many programs
FEW_PAGES = 16  # per program
MAX_ROWS = 64  # rows of a list (queries times q heads of a kv head) per program
PARTS_AT_ONCE = 8  # parts that a program of the merge reads at a time
INTERPRETED_PROGRAMS = 5  # sometimes more than there are pages


class Tiles(NamedTuple):
    """How programs of a decoding step divide their keys."""

    keys: int  # that a program multiplies at a time
    warps: int
    programs: int  # that a multiprocessor holds
    registers: int | None  # per thread, at most


def tiles_of(cache: PagedCache, dtype: torch.dtype, chooses: bool) -> Tiles:
    """Return the tiles for queries of this dtype, by programs that also choose pages if `chooses`.

    A tile that is one small page has one address. On an H200, 256 of 2,048 pages of 16 of 16 sequences take 77 us, and
    with tiles of four pages, whose keys have an address each, 110 us.
    """
    keys = keys_per_tile(cache, dtype)
    if cache.k.dtype.itemsize == 1 and gpu_of(cache.device).capability[0] == 9:  # Hopper; others spill
        return Tiles(keys, NUM_WARPS, CROWDED_PROGRAMS, CROWDED_REGISTERS)
    if chooses or cache.page_size >= keys or dtype == torch.float32 or cache.page_size < KEYS_PER_WARP:
        return Tiles(keys, NUM_WARPS, PROGRAMS_PER_PROCESSOR, None)
    return Tiles(cache.page_size, cache.page_size // KEYS_PER_WARP, CROWDED_PROGRAMS, None)


def keys_per_tile(cache: PagedCache, dtype: torch.dtype) -> int:
    """Return the keys that a program multiplies at a time, for queries of this dtype; a page has whole tiles."""
    row = (padded(cache.head_dim) + padded(cache.head_dim_v)) * cache.k.dtype.itemsize
    gpu = gpu_of(cache.device)
    half = gpu.shared_memory // 2  # so that two tiles are in flight
    wide = max(cache.head_dim, cache.head_dim_v) > (256 if gpu.has_wgmma else 128) or KEYS_PER_TILE * row > half
    tile = KEYS_PER_TILE if dtype != torch.float32 and not wide else 32
    return max(16, min(tile, cache.page_size)) if cache.page_size > tile else tile


def stages(gpu: Gpu, dtype: torch.dtype, loads: int) -> int:
    """Return the pipeline stages of a program whose tiles are found by `loads` dependent loads.

    AMD's compiler has a buffer per stage, for which its GPUs have too little shared memory.
    """
    return 1 if dtype == torch.float32 or gpu.vendor == "amd" else 1 + TILES_AHEAD * loads


def reads_pairs(cache: PagedCache) -> bool:
    """Return whether 8-bit values are read in pairs, as 16 bits: on Hopper, where their addresses are even."""
    if not gpu_of(cache.device).overlaps_launches or cache.head_dim_v < 32:
        return False
    return all(n % 2 == 0 for n in (*cache.v.shape[3:], *cache.v.stride()[:3], cache.v.storage_offset()))


def programs_of(cache: PagedCache, at_once: int, lists: int, pages: int) -> int:
    """Return how many programs to start: as many as run `at_once`, if possible a multiple of the number of lists.

    Lists of equal length then share no program. Start half as many if each program would get few pages: on an H200, one
    sequence of 128k keys then takes 36 us instead of 38.
    """
    gpu = gpu_of(cache.device)
    most = INTERPRETED_PROGRAMS if gpu.vendor == "interpreter" else at_once * gpu.processors
    if gpu.vendor != "interpreter" and pages < FEW_PAGES * most:
        most //= 2
    return max(1, min(most // lists * lists if lists <= most else most, pages))
