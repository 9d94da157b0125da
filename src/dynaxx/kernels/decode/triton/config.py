# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiles and numbers of programs of a decoding step: pure functions of the cache and the device."""

import torch

from dynaxx.kernels.device import Gpu, gpu_of, padded
from dynaxx.layout.paging import PagedCache

KEYS_PER_TILE = 64
NUM_WARPS, TILES_AHEAD = 4, 2
PROGRAMS_PER_PROCESSOR = 2
CROWDED_PROGRAMS = 4  # per multiprocessor, for 8-bit caches, where arithmetic dominates
CROWDED_REGISTERS = 128  # per thread, so that a multiprocessor holds as many programs
FEW_PAGES = 16  # per program
MAX_ROWS = 64  # rows of a list (queries times q heads of a kv head) per program
PARTS_AT_ONCE = 8  # parts that a program of the merge reads at a time
INTERPRETED_PROGRAMS = 5  # sometimes more than there are pages


def is_crowded(cache: PagedCache) -> bool:
    """Return whether a multiprocessor holds four programs instead of two."""
    return cache.k.dtype.itemsize == 1 and gpu_of(cache.device).capability[0] == 9  # Hopper; others spill


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


def programs_of(cache: PagedCache, lists: int, pages: int) -> int:
    """Return how many programs to start: as many as run at once, if possible a multiple of the number of lists.

    Lists of equal length then share no program. Start half as many if each program would get few pages: on an H200, one
    sequence of 128k keys then takes 36 us instead of 38.
    """
    gpu, at_once = gpu_of(cache.device), CROWDED_PROGRAMS if is_crowded(cache) else PROGRAMS_PER_PROCESSOR
    most = INTERPRETED_PROGRAMS if gpu.vendor == "interpreter" else at_once * gpu.processors
    if gpu.vendor != "interpreter" and pages < FEW_PAGES * most:
        most //= 2
    return max(1, min(most // lists * lists if lists <= most else most, pages))
