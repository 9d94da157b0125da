# SPDX-License-Identifier: Apache-2.0
"""Kinds of blocks. Blocks with the same element mask are of one kind, so that each mask is evaluated once.

A rule gives the kind of each block and the mask of each kind as bits. Combined rules combine the masks of the kinds
that occur in the same block. Bits are packed as in `ElementMasks`, 32 columns to a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynaxx.layout import EMPTY, FULL, BlockGrid
from dynaxx.lazy import lazy
from dynaxx.patterns.runs import Ints

Words = NDArray[np.int32]
FEW = 1 << 14  # distinct numbers below this limit are found with a table, others by sorting


class Blocks:
    """Some blocks of a grid."""

    def __init__(self, grid: BlockGrid, rows: Ints, cols: NDArray[Any]) -> None:
        self.grid, self.rows, self.cols = grid, rows, cols

    @classmethod
    def at(cls, grid: BlockGrid, apart: Ints) -> Blocks:
        """Return blocks at `apart` times the smaller block size from the diagonal, for rules on distances only."""
        blocks = cls(grid, apart[:0], apart[:0])
        blocks.__dict__["distances"] = apart * min(grid.block_size) + grid.offset, np.arange(len(apart))
        return blocks

    @lazy
    def distances(self) -> tuple[Ints, Ints]:
        """Return the distinct distances from first key to first query, and the index of each block's distance."""
        q_block, kv_block = self.grid.block_size
        step = min(q_block, kv_block)
        apart = self.rows * (q_block // step) - self.cols * (kv_block // step)
        least = int(np.minimum.reduce(apart))
        found, which = distinct(apart - least, int(np.maximum.reduce(apart)) - least + 1)
        return (found + least) * step + self.grid.offset, which


class Kinds(NamedTuple):
    """Blocks by their element masks."""

    kind: Ints  # (n,) the kind of each block, an index into `bits`
    bits: Words  # (kinds, q_block | 1, words) int32; 1 if all rows of a block are equal


def distinct(numbers: Ints, limit: int) -> tuple[Ints, Ints]:
    """Return the distinct values of (n,) numbers in [0, limit), ascending, and the index of each number among them."""
    if limit > max(FEW, 4 * len(numbers)):
        found, which = np.unique(numbers, return_inverse=True)
        return found, which
    place = np.zeros(limit, np.int64)
    place[numbers] = 1
    found = place.nonzero()[0]
    place[found] = np.arange(len(found))
    return found, place.take(numbers)


def met(parts: list[Kinds]) -> tuple[Ints, list[Words]]:
    """Return the kind of each block under all parts together, and for each such kind the mask of every part."""
    kind, count = parts[0].kind, len(parts[0].bits)
    for part in parts[1:]:
        kind = kind * len(part.bits) + part.kind
        count *= len(part.bits)
    found, kind = distinct(kind, count)
    masks = []
    for part in reversed(parts):
        masks.append(part.bits[found % len(part.bits)])
        found = found // len(part.bits)
    return kind, masks[::-1]


def packed(shown: NDArray[np.bool_]) -> Words:
    """Return (..., columns) bool packed into (..., words) int32."""
    eights = np.packbits(shown, axis=-1, bitorder="little")
    if eights.shape[-1] % 4:
        eights = np.concatenate([eights, np.zeros_like(eights)], -1)  # 16 columns
    return eights.view(np.int32)


def whole_or_nothing(held: NDArray[np.bool_]) -> Kinds:
    """Return kinds for blocks that are visible as a whole where `held` is True, and hidden elsewhere."""
    return Kinds(held.astype(np.int64), np.array([0, -1], np.int32).reshape(2, 1, 1))


def by_distance(shown: NDArray[np.bool_], which: Ints, block_size: tuple[int, int]) -> Kinds:
    """Return masks that depend on the distance between query and key alone.

    Args:
        shown: (m, q_block + kv_block - 1) bool for m kinds of blocks: the visible distances, ascending from that of the
            first query and last key to that of the last query and first key.
        which: (n,) the index of each block in `shown`.
        block_size: (q_block, kv_block) in tokens.
    """
    q_block, kv_block = block_size
    first: dict[bytes, int] = {}
    kind = np.array([first.setdefault(row.tobytes(), len(first)) for row in np.packbits(shown, axis=1)])
    example = np.zeros(len(first), np.int64)
    example[kind[::-1]] = np.arange(len(kind))[::-1]
    turned = np.ascontiguousarray(shown[example, ::-1])  # row r of a block starts at index q_block - 1 - r
    tiles: NDArray[np.bool_] = np.ndarray(
        (len(example), q_block, kv_block), np.bool_, turned, q_block - 1, (turned.strides[0], -1, 1)
    )
    return Kinds(kind.take(which), packed(tiles))


def element_masks(kinds: Kinds, block_size: tuple[int, int]) -> tuple[Words, Ints]:
    """Return the bits of the partial masks that occur, and a mask id per block: an index into them, FULL or EMPTY."""
    q_block, kv_block = block_size
    bits = np.empty((len(kinds.bits), q_block, -(-kv_block // 32)), np.int32)
    bits[:] = kinds.bits
    word = (2 ** min(kv_block, 32) - 1).to_bytes(4, "little")
    known = {bytes(bits[0].nbytes): EMPTY, word * bits[0].size: FULL}
    mask_ids = np.array([known.setdefault(mask.tobytes(), len(known) - 2) for mask in bits])
    example = np.zeros(len(known) - 2, np.int64)
    cut = (mask_ids >= 0).nonzero()[0]
    example[mask_ids[cut]] = cut
    return bits[example], mask_ids.take(kinds.kind)
