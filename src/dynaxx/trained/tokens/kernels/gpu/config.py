# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the kernels over chosen tokens: pure functions of shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dynaxx.kernels.device import Gpu, padded, power_of_two

SMALLEST = 16  # keys of a matrix instruction
MAX_MARKS = 32  # queries of a tile: bits of a mark
WIDE = 256  # head_dim above which a backward goes in steps: `wide.py`
MAX_BY_PRODUCTS = 256  # columns of rows that are added by products; wider ones are read as fast without


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile: neighbouring queries times q heads of a unit, filled up to a power of two."""

    per_tile: int  # queries
    part: int  # q heads
    parts: int  # programs that share the q heads of a unit

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return max(16, power_of_two(self.per_tile * self.part))


@dataclass(frozen=True)
class LaunchSizes:
    """Keys per step and launch options of a kernel."""

    block_n: int
    num_warps: int
    prefetch: int  # iterations that rows of k and v are loaded ahead; 0: not
    max_registers: int | None = None  # per thread

    def within(self, gpu: Gpu, row_bytes: int) -> LaunchSizes:
        """Return sizes whose tiles of streamed rows, those loaded ahead included, fit in the GPU's shared memory."""
        block_n = self.block_n
        while block_n > SMALLEST and (self.prefetch + 1) * block_n * row_bytes > gpu.shared_memory:
            block_n //= 2
        return replace(self, block_n=block_n)

    def options(self, gpu: Gpu) -> dict[str, int]:
        """Return the launch options of the kernel."""
        sizes = {"BLOCK_N": self.block_n, "PREFETCH": self.prefetch}
        warps = {"num_warps": self.num_warps, "num_stages": self.prefetch + 1}
        return sizes | warps | gpu.limit_registers(self.max_registers)


@lru_cache(maxsize=256)
def tile_rows(group_size: int, widest: int, itemsize: int, gpu: Gpu) -> TileRows:
    """Return the rows of a tile: 64, which fill a matrix instruction of Hopper; 16 in fp32, which has none.

    128 visit fewer keys, but leave room for one program at once. Wide rows are 32 without wgmma.
    """
    most = 16 if itemsize == 4 else 64 if widest <= WIDE or gpu.has_wgmma else 32
    part = min(most, group_size)
    return TileRows(min(most // part, MAX_MARKS), part, -(-group_size // part))


def widths(width: int) -> tuple[int, int]:
    """Cut a width into a power of two and a rest, 0 for none: 576 = 512 + 64. Small rests are padding instead."""
    most = 1 << (width.bit_length() - 1)
    if width <= 128 or most == width:
        return padded(width), 0
    return most, padded(width - most)


@lru_cache(maxsize=256)
def forward_launch(gpu: Gpu, widest: int, itemsize: int, latent: bool) -> LaunchSizes:
    """Return the launch of the forward. On an H100 the best of several, by up to 1.6x: `docs/benchmarks/tokens.md`."""
    row = sum(widths(widest)) * itemsize * (1 if latent else 2)
    return _forward_launch(widest, itemsize, latent, gpu).within(gpu, row)


def _forward_launch(widest: int, itemsize: int, latent: bool, gpu: Gpu) -> LaunchSizes:
    if itemsize == 4:
        return LaunchSizes(16 if widest > WIDE else 32, 8 if widest > WIDE else 4, 0)
    if widest > WIDE:
        if gpu.vendor == "amd":
            return LaunchSizes(32, 4, 1)
        return LaunchSizes(64, 8, 1) if latent else LaunchSizes(16, 8, 2)
    if widest > 128 or not gpu.multiplies_by_warpgroup:
        return LaunchSizes(32, 4, 1)
    return LaunchSizes(32, 4, 1, max_registers=128)  # four programs at once


@lru_cache(maxsize=256)
def backward_launch(widest: int, itemsize: int, gpu: Gpu) -> LaunchSizes:
    """Return the launch of the backward for head_dim up to `WIDE`; sizes whose sums are not spilled."""
    if itemsize == 4:
        return LaunchSizes(16, 8 if widest > 128 else 4, 0)
    if gpu.vendor == "amd":
        return LaunchSizes(32, 4, 1)
    return LaunchSizes(64, 8 if widest > 128 or not gpu.has_wgmma else 4, 1)


@lru_cache(maxsize=256)
def wide_launches(itemsize: int, latent: bool, gpu: Gpu) -> tuple[LaunchSizes, LaunchSizes, LaunchSizes]:
    """Return the launches of the three steps of a wide backward: scores, dq and rows."""
    if itemsize == 4:
        return LaunchSizes(16, 8, 0), LaunchSizes(16, 8, 0), LaunchSizes(16, 8, 0)
    if not gpu.has_wgmma:
        return LaunchSizes(16, 4, 1), LaunchSizes(16, 8, 1), LaunchSizes(64, 8, 1)
    return LaunchSizes(32 if latent else 16, 4, 1), LaunchSizes(64, 8, 1), LaunchSizes(128, 8, 2)


@lru_cache(maxsize=256)
def sum_launch(columns: int, itemsize: int, parts: int) -> LaunchSizes:
    """Return the launch of the sums of rows of dk and dv: rows at once, and how far ahead they are loaded."""
    if itemsize == 4:
        return LaunchSizes(8, 4, 0)
    return LaunchSizes(8, 2, 3) if parts > 1 or columns > MAX_BY_PRODUCTS else LaunchSizes(64, 4, 2)
