"""Element masks of partial blocks: a table of the distinct masks that occur, each as bits and, where it is one, a band.

Masks of real patterns repeat: a sliding window over a million tokens has three. So a layout stores a small table and
each partial block names its entry. A kernel may read the packed bits, which say everything, or the closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynaxx.layout.grid import BlockGrid

FULL = -1  # code of a block without an element mask
EMPTY = -2  # code of a block that is not visited; never stored in a layout

NO_BAND = (1, 0)


@dataclass(frozen=True, eq=False)
class ElementMasks:
    """`num_masks` distinct masks of one block size. In-block coordinates: r = query row, c = key column."""

    bits: Tensor  # (num_masks, q_block, ceil(kv_block / 32)) int32: (r, c) is visible iff bit c % 32 of word c // 32
    bands: Tensor  # (num_masks, 2) int32: (lo, hi) where the mask is exactly lo <= r - c <= hi, else (1, 0)
    kv_block: int

    def __len__(self) -> int:
        return self.bits.shape[0]

    @classmethod
    def from_dense(cls, masks: Tensor) -> ElementMasks:
        """Pack (num_masks, q_block, kv_block) bool."""
        num_masks, q_block, kv_block = masks.shape
        words = -(-kv_block // 32)
        padded = torch.nn.functional.pad(masks, (0, words * 32 - kv_block)).view(num_masks, q_block, words, 32)
        weights = torch.ones(32, dtype=torch.int64, device=masks.device) << torch.arange(32, device=masks.device)
        packed = (padded * weights).sum(-1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        return cls(packed, _bands(masks), kv_block)

    @classmethod
    def empty(cls, block_size: tuple[int, int], device: torch.device | str = "cpu") -> ElementMasks:
        return cls.from_dense(torch.zeros(0, *block_size, dtype=torch.bool, device=device))

    def to_dense(self) -> Tensor:
        """(num_masks, q_block, kv_block) bool."""
        shifts = torch.arange(32, device=self.bits.device, dtype=torch.int32)
        bits = (self.bits[..., None] >> shifts) & 1
        return bits.flatten(-2)[..., : self.kv_block].bool()

    def to(self, device: torch.device | str) -> ElementMasks:
        return ElementMasks(self.bits.to(device), self.bands.to(device), self.kv_block)

    def append(self, other: ElementMasks) -> ElementMasks:
        """The entries of `other` behind these: its codes shift by `len(self)`."""
        return ElementMasks(torch.cat([self.bits, other.bits]), torch.cat([self.bands, other.bands]), self.kv_block)


def _bands(masks: Tensor) -> Tensor:
    """The closed form of each mask: (lo, hi) if it is the band lo <= r - c <= hi and not empty, else (1, 0)."""
    num_masks, q_block, kv_block = masks.shape
    distance = torch.arange(q_block)[:, None] - torch.arange(kv_block)[None, :]
    distance = distance.to(masks.device)
    lo = torch.where(masks, distance, q_block).amin((1, 2)) if num_masks else masks.new_zeros(0, dtype=torch.int64)
    hi = torch.where(masks, distance, -kv_block).amax((1, 2)) if num_masks else lo
    band = (distance >= lo[:, None, None]) & (distance <= hi[:, None, None])
    is_band = (band == masks).all(-1).all(-1) & (lo <= hi)
    found = torch.stack([lo, hi], dim=-1)
    none = torch.tensor(NO_BAND, device=masks.device)
    return torch.where(is_band[:, None], found, none).to(torch.int32)


def causal_codes(grid: BlockGrid, rows: Tensor, cols: Tensor) -> Tensor:
    """Code of each block under `grid.causal` alone: FULL, EMPTY, or the entry of `causal_masks(grid)`. O(1) each."""
    if not grid.causal:
        return torch.full_like(rows + cols, FULL)
    q_block, kv_block = grid.block_size
    distance = rows * q_block + grid.offset - cols * kv_block  # first query's position minus first key's
    first, step = causal_code_terms(grid)
    code = torch.div(distance - first, step, rounding_mode="floor")
    code = torch.where(distance >= kv_block - 1, FULL, code)
    return torch.where(distance <= -q_block, EMPTY, code)


@lru_cache(maxsize=64)
def causal_masks(grid: BlockGrid) -> ElementMasks:
    """The masks of all blocks that the causal diagonal can cut, in the order that `causal_codes` counts them."""
    q_block, kv_block = grid.block_size
    if not grid.causal:
        return ElementMasks.empty(grid.block_size)
    with torch.inference_mode(False):  # what is cached must serve training, too
        first, step = causal_code_terms(grid)
        distances = torch.arange(first, kv_block - 1, step)
        r, c = torch.arange(q_block)[:, None], torch.arange(kv_block)[None, :]
        return ElementMasks.from_dense(distances[:, None, None] + r - c >= 0)


def causal_code_terms(grid: BlockGrid) -> tuple[int, int]:
    """(first, step) with which a block that the diagonal cuts has code (distance - first) // step.

    Block sizes are powers of two, so the smaller divides every distance but the offset; the first is the smallest
    distance > -q_block that blocks of this grid can have.
    """
    step = min(grid.block_size)
    return 1 - grid.block_size[0] + (grid.offset - 1 + grid.block_size[0]) % step, step
