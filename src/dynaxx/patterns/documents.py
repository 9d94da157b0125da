# SPDX-License-Identifier: Apache-2.0
"""The pattern of documents packed into one sequence; each document sees only itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import as_integer, typed
from dynaxx.layout import BlockGrid
from dynaxx.layout.host import never_traced
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, distinct, packed
from dynaxx.patterns.program import Op
from dynaxx.patterns.runs import Ints, Runs, Visited
from dynaxx.settings import Count


@typed
@dataclass(frozen=True)
class Documents(Pattern, kind="documents"):
    """Keys of the query's own document in a packed sequence.

    Args:
        cu_seqlens: cumulative lengths (0, ..., total) of the documents in key positions, host integers.
    """

    cu_seqlens: tuple[Count, ...]

    @never_traced
    def __post_init__(self) -> None:
        """Convert the ends to a tuple of int and check them."""
        given = self.cu_seqlens.tolist() if isinstance(self.cu_seqlens, Tensor) else self.cu_seqlens
        ends = tuple(as_integer("cu_seqlens", end) for end in given)
        if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
            raise ValueError(f"`cu_seqlens` must start at 0 and not fall, got {ends[:8]}")
        object.__setattr__(self, "cu_seqlens", ends)

    @override
    @classmethod
    def random(cls, rng: random.Random, seqlen_k: int) -> Self:
        return cls((0, *sorted(rng.sample(range(seqlen_k + 1), min(seqlen_k, 3))), seqlen_k))

    def _document(self, positions: Ints) -> Ints:
        """Return the index of each position's document. Positions past the end belong to the last document."""
        return np.searchsorted(np.array(self.cu_seqlens[1:-1], np.int64), positions, side="right")

    def _check(self, grid: BlockGrid) -> None:
        if self.cu_seqlens[-1] != grid.seqlen_k:
            raise ValueError(f"`cu_seqlens` must end at seqlen_k = {grid.seqlen_k}, got {self.cu_seqlens[-1]}")

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        q_document, k_document = (torch.from_numpy(self._document(pos.numpy())) for pos in (q_pos, k_pos))
        return q_document == k_document

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        self._check(grid)
        q_block, kv_block = grid.block_size
        bounds = np.array(self.cu_seqlens)
        first, last = grid.spans()
        document, last_document = self._document(first), self._document(last)
        end = last if grid.causal else bounds[last_document + 1] - 1
        end = np.minimum(end, grid.seqlen_k - 1) // kv_block + 1
        touched = Runs.one(bounds[document] // kv_block, end)
        alone = document == self._document(first + q_block - 1)
        full_start = (bounds[document] + kv_block - 1) // kv_block
        bounds[-1] = grid.kv_blocks * kv_block  # the padding past the end belongs to the last document
        full = Runs.one(full_start, np.where(alone, bounds[document + 1] // kv_block, 0))
        return Visited(touched, full.within(touched))

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        grid, (q_block, kv_block) = blocks.grid, blocks.grid.block_size
        self._check(grid)
        row_kind, q_documents = self._within(q_block, grid.q_blocks, grid.offset)
        col_kind, k_documents = self._within(kv_block, grid.kv_blocks, 0)
        q_first = self._document(np.arange(grid.q_blocks) * q_block + grid.offset)
        k_first = self._document(np.arange(grid.kv_blocks) * kv_block)
        apart = np.minimum(np.maximum(q_first[blocks.rows] - k_first[blocks.cols], -q_block), kv_block)
        spread = q_block + kv_block + 1
        kind = (row_kind[blocks.rows] * len(k_documents) + col_kind[blocks.cols]) * spread + apart + q_block
        found, kind = distinct(kind, len(q_documents) * len(k_documents) * spread)
        pair, apart = found // spread, found % spread - q_block
        q_documents, k_documents = q_documents[pair // len(k_documents)], k_documents[pair % len(k_documents)]
        return Kinds(kind, packed((q_documents + apart[:, None])[:, :, None] == k_documents[:, None, :]))

    @override
    def program(self, grid: BlockGrid) -> list[int]:
        self._check(grid)
        return [Op.DOCUMENTS, len(self.cu_seqlens), *self.cu_seqlens]

    def _within(self, size: int, count: int, offset: int) -> tuple[Ints, Ints]:
        """Return the kinds of `count` blocks of `size` tokens, the first of which starts at `offset`.

        Also return the document of each token for every kind, counted from the kind's first document. Blocks of kind 0
        lie in a single document.
        """
        starts = np.array(self.cu_seqlens[1:-1], np.int64) - offset
        starts = starts[(starts > 0) & (starts < count * size) & (starts % size > 0)]
        cut, which = np.unique(starts // size, return_inverse=True)
        kind = np.zeros(count, np.int64)
        kind[cut] = np.arange(1, len(cut) + 1)
        begins = np.zeros((len(cut) + 1, size), np.int64)
        np.add.at(begins, (which + 1, starts % size), 1)
        return kind, begins.cumsum(1)
