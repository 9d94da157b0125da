# SPDX-License-Identifier: Apache-2.0
"""Positions of packed sequences whose queries choose single tokens, or blocks of a few neighbouring tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dynaxx.layout.host import on_host
from dynaxx.lazy import lazy

TOKEN_BLOCKS = (1, 2, 4, 8)  # sizes of a choice, in tokens, that are no blocks of a `BlockLayout`


@dataclass(frozen=True)
class TokenSpans:
    """Packed sequences. The queries of each are aligned to its last keys."""

    ends_q: tuple[int, ...]  # (num_seqs + 1,) cumulative numbers of queries
    ends_k: tuple[int, ...]  # of keys
    block_size: int = 1  # tokens that are chosen together

    @lazy
    def position(self) -> Tensor:
        """Return (tokens_q,) int64 on the CPU: each query's position among the keys of its sequence; may be < 0."""
        return self._per_query(lambda a, b, c, d: torch.arange(d - c - (b - a), d - c, device="cpu"))

    @lazy
    def first_key(self) -> Tensor:
        """Return (tokens_q,) int64 on the CPU: the row of the first key of each query's sequence."""
        return self._per_query(lambda a, b, c, d: torch.full((b - a,), c, dtype=torch.int64, device="cpu"))

    @lazy
    def blocks(self) -> Tensor:
        """Return (tokens_q,) int32 on the CPU: the number of blocks of each query's sequence."""
        return self._per_query(
            lambda a, b, c, d: torch.full((b - a,), -(-(d - c) // self.block_size), dtype=torch.int64, device="cpu")
        ).int()

    @on_host
    def _per_query(self, of_sequence: object) -> Tensor:
        pairs = zip(pairwise(self.ends_q), pairwise(self.ends_k), strict=True)
        parts = [of_sequence(a, b, c, d) for (a, b), (c, d) in pairs]  # type: ignore[operator]
        return torch.cat(parts).long() if parts else torch.zeros(0, dtype=torch.int64)


def ascending(block_indices: Tensor) -> Tensor:
    """Return each row's numbers in ascending order, with -1 at the end."""
    most = torch.iinfo(block_indices.dtype).max
    rows = torch.where(block_indices < 0, most, block_indices).sort(-1).values
    return torch.where(rows == most, -1, rows)
