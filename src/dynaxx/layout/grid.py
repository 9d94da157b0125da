# SPDX-License-Identifier: Apache-2.0
"""`BlockGrid`: the grid of blocks under a layout: sequence lengths, block sizes and positions of blocks.

Legend: row = q block index, col = kv block index. Queries are bottom-right aligned to keys: query `i` has key position
`i + offset`, where offset = seqlen_k - seqlen_q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.arguments import as_integer
from dynaxx.layout.host import on_host

BLOCK_SIZES = (16, 32, 64, 128)


def as_block_size(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (q_block, kv_block); each must be one of 16, 32, 64, 128."""
    try:
        q_block, kv_block = map(index, block_size if isinstance(block_size, tuple | list) else (block_size, block_size))
    except (TypeError, ValueError):
        q_block = kv_block = 0
    if q_block not in BLOCK_SIZES or kv_block not in BLOCK_SIZES:
        raise ValueError(f"`block_size` must be one of {BLOCK_SIZES} or a pair of them, got {block_size!r}")
    return q_block, kv_block


@dataclass(frozen=True)
class BlockGrid:
    """Sequence lengths and block sizes in tokens, and whether keys after the query are hidden."""

    seqlen_q: int
    seqlen_k: int
    block_size: tuple[int, int]
    causal: bool = True

    def __post_init__(self) -> None:
        """Check the lengths and the block size, and convert lengths to int."""
        if type(self.seqlen_q) is not int or type(self.seqlen_k) is not int:
            for name in ("seqlen_q", "seqlen_k"):
                object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        if self.seqlen_q < 0 or self.seqlen_k < 0:
            raise ValueError(f"sequence lengths must be >= 0, got {self.seqlen_q} and {self.seqlen_k}")
        as_block_size(self.block_size)

    @property
    def offset(self) -> int:
        """Key position of query 0; negative if there are more queries than keys."""
        return self.seqlen_k - self.seqlen_q

    @property
    def q_blocks(self) -> int:
        """Return the number of q blocks."""
        return -(-self.seqlen_q // self.block_size[0])

    @property
    def kv_blocks(self) -> int:
        """Return the number of kv blocks."""
        return -(-self.seqlen_k // self.block_size[1])

    def spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `q_span` of all rows as numpy arrays, in which patterns compute."""
        return _spans(self)

    def q_span(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key positions of the first and the last query of each row; the last is clipped to seqlen_q."""
        first = rows * self.block_size[0]
        last = (first + self.block_size[0]).clamp(max=self.seqlen_q) - 1
        return first + self.offset, last + self.offset

    def rows(self) -> Tensor:
        """Return the numbers of the q blocks."""
        return torch.arange(self.q_blocks, device="cpu")

    def causal_kv_blocks(self, rows: Tensor) -> Tensor:
        """Return how many kv blocks each row may visit, always a prefix of the columns. Shape and device of `rows`."""
        if not self.causal:
            return torch.full_like(rows, self.kv_blocks)
        _, last = self.q_span(rows)
        return torch.div(last, self.block_size[1], rounding_mode="floor").add(1).clamp(0, self.kv_blocks)

    def visible_blocks(self) -> int:
        """Return how many blocks all rows together may visit; density is a share of this number."""
        return _visible_blocks(self)


@lru_cache(maxsize=8)
def _spans(grid: BlockGrid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first = np.arange(grid.q_blocks) * grid.block_size[0] + grid.offset
    return first, np.minimum(first + grid.block_size[0], grid.seqlen_k) - 1


@lru_cache(maxsize=1024)
@on_host
def _visible_blocks(grid: BlockGrid) -> int:
    return int(grid.causal_kv_blocks(grid.rows()).sum())
