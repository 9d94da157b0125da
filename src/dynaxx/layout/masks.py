# SPDX-License-Identifier: Apache-2.0
"""`ElementMasks`: a table of the distinct masks inside partial blocks, each as packed bits and, if possible, as a band.

Masks repeat in real patterns: a sliding window over a million tokens has three distinct masks. A layout therefore
stores a small table, and each partial block stores an index into it. Kernels read either the packed bits, which
represent any mask, or the band, which is a closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.derivatives import untransformed
from dynaxx.layout.grid import BlockGrid
from dynaxx.layout.host import lasting_copy, never_traced

FULL = -1  # mask id of a block without an element mask
EMPTY = -2  # mask id of a block that is not visited; never stored in a layout

NO_BAND = (1, 0)
EIGHT_BITS = 0x0102040810204080  # multiplier that moves bit 0 of byte i to bit 56 + i of an int64, without carries


@dataclass(frozen=True, eq=False)
class ElementMasks:
    """`num_masks` distinct masks of one block size. Coordinates inside a block: r = query row, c = key column."""

    bits: Tensor  # (num_masks, q_block, ceil(kv_block / 32)) int32: (r, c) is visible iff bit c % 32 of word c // 32
    bands: Tensor  # (num_masks, 2) int32: (lo, hi) where the mask is exactly lo <= r - c <= hi, else (1, 0)
    kv_block: int

    def __len__(self) -> int:
        """Return the number of masks."""
        return self.bits.shape[0]

    @classmethod
    def from_dense(cls, masks: Tensor) -> ElementMasks:
        """Pack boolean masks, (num_masks, q_block, kv_block)."""
        count, q_block, kv_block = masks.shape
        if not count:
            return cls.empty((q_block, kv_block), masks.device)
        padded = torch.nn.functional.pad(masks, (0, -kv_block % 32)) if kv_block % 32 else masks.contiguous()
        eights = (padded.view(torch.int64) * EIGHT_BITS) >> 56  # packs eight bytes of 0 or 1 into eight bits, in order
        bits = (eights & 0xFF).to(torch.uint8).view(torch.int32)
        return cls(bits, _bands(bits, kv_block), kv_block)

    @classmethod
    def empty(cls, block_size: tuple[int, int], device: torch.device | str = "cpu") -> ElementMasks:
        """Return zero masks of this block size."""
        numbers = torch.zeros(0, dtype=torch.int32, device=device)
        return cls(numbers.view(0, block_size[0], -(-block_size[1] // 32)), numbers.view(0, 2), block_size[1])

    def to_dense(self) -> Tensor:
        """Return the masks as (num_masks, q_block, kv_block) bool."""
        shifts = torch.arange(32, device=self.bits.device, dtype=torch.int32)
        bits = (self.bits[..., None] >> shifts) & 1
        return bits.flatten(-2)[..., : self.kv_block].bool()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled or copied masks."""
        vars(self).update({name: lasting_copy(x) for name, x in state.items()})

    def to(self, device: torch.device | str) -> ElementMasks:
        """Return the masks on another device."""
        return ElementMasks(self.bits.to(device), self.bands.to(device), self.kv_block)

    def take(self, kept: Tensor) -> ElementMasks:
        """Return the masks that `kept` selects: (num_masks,) bool or int64 indices."""
        return ElementMasks(self.bits[kept], self.bands[kept], self.kv_block)

    def append(self, other: ElementMasks) -> ElementMasks:
        """Return this table followed by the masks of `other`, whose ids shift by `len(self)`."""
        return ElementMasks(torch.cat([self.bits, other.bits]), torch.cat([self.bands, other.bands]), self.kv_block)


@never_traced
@never_traced  # a compiler's guards on tensors of numpy fail in inference mode
def _bands(bits: Tensor, kv_block: int) -> Tensor:
    return torch.from_numpy(bands_of(bits.cpu().numpy(), kv_block)).to(bits.device)


def bands_of(bits: NDArray[np.int32], kv_block: int) -> NDArray[np.int32]:
    """Return the band of each mask: (lo, hi) if its visible pairs are exactly lo <= r - c <= hi, else (1, 0).

    A mask is a band if each row is the previous row shifted by one column, and if the distances r - c visible in the
    first row and first column have no gap. Empty masks have no band.
    """
    moved = bits[:, :-1] << 1
    moved[..., 1:] |= bits[:, :-1, :-1] < 0  # bit 31 of a word is bit 0 of the next
    moved ^= bits[:, 1:]
    moved[..., 0] &= -2 if kv_block >= 32 else (1 << kv_block) - 2  # ignore bit 0, which the shift fills with zeros
    same = ~np.logical_or.reduce(moved, (1, 2))
    shown = np.empty((len(bits), kv_block + bits.shape[1] - 1), np.bool_)  # indexed by distance, from 1 - kv_block
    shown[:, :kv_block] = np.unpackbits(bits[:, 0].view(np.uint8), axis=1, bitorder="little")[:, kv_block - 1 :: -1]
    shown[:, kv_block:] = bits[:, 1:, 0] & 1
    first, count = shown.argmax(1), np.add.reduce(shown, 1, np.int64)
    bands = np.empty((len(bits), 2), np.int32)
    bands[:, 0] = first - (kv_block - 1)
    bands[:, 1] = bands[:, 0] + count - 1
    gapless = (shown.shape[1] - shown[:, ::-1].argmax(1) - first) == count
    bands[~(same & gapless & (count > 0))] = NO_BAND
    return bands


def causal_mask_ids(grid: BlockGrid, rows: Tensor, cols: Tensor) -> Tensor:
    """Return the mask id of each block under `grid.causal` alone: FULL, EMPTY or an index into `causal_masks(grid)`."""
    if not grid.causal:
        return torch.full_like(rows + cols, FULL)
    q_block, kv_block = grid.block_size
    distance = rows * q_block + grid.offset - cols * kv_block  # first query's position minus first key's
    first, step = causal_mask_id_terms(grid)
    mask_id = torch.div(distance - first, step, rounding_mode="floor")
    mask_id = torch.where(distance >= kv_block - 1, FULL, mask_id)
    return torch.where(distance <= -q_block, EMPTY, mask_id)


def causal_masks(grid: BlockGrid) -> ElementMasks:
    """Return the masks of all blocks that the causal diagonal can cut, in the order of `causal_mask_ids`.

    The tensors are copies that the caller may modify.
    """
    masks = _causal_masks(grid)
    return ElementMasks(masks.bits.clone(), masks.bands.clone(), masks.kv_block)


@lru_cache(maxsize=64)
def _causal_masks(grid: BlockGrid) -> ElementMasks:
    q_block, kv_block = grid.block_size
    if not grid.causal:
        return ElementMasks.empty(grid.block_size)
    with untransformed(), torch.inference_mode(False):  # cached tensors must also be usable in training
        first, step = causal_mask_id_terms(grid)
        distances = torch.arange(first, kv_block - 1, step, device="cpu")
        r, c = torch.arange(q_block, device="cpu")[:, None], torch.arange(kv_block, device="cpu")[None, :]
        return ElementMasks.from_dense(distances[:, None, None] + r - c >= 0)


def causal_mask_id_terms(grid: BlockGrid) -> tuple[int, int]:
    """Return (first, step): a block that the diagonal cuts has id (distance - first) // step.

    Block sizes are powers of two, so the smaller one divides every distance up to the constant offset. `first` is the
    smallest distance > -q_block that blocks of this grid can have.
    """
    step = min(grid.block_size)
    return 1 - grid.block_size[0] + (grid.offset - 1 + grid.block_size[0]) % step, step
