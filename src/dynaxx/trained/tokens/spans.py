# SPDX-License-Identifier: Apache-2.0
"""Positions of packed sequences whose queries choose single tokens, or blocks of a few neighbouring tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dynaxx.layout.host import on_host
from dynaxx.layout.packed import CuSeqlens, host_lengths
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

    def pieces(self, pair_bytes: int, limit: int) -> Iterator[tuple[slice, slice, TokenSpans]]:
        """Yield a few queries of a sequence, the keys up to that of the last one, and both as a sequence of their own.

        Queries that see no key are left out.

        Args:
            pair_bytes: bytes that a pair of a query and a key takes.
            limit: bytes that the pairs of a piece may take; a piece has one query at least.
        """
        for (a, b), (c, d) in zip(pairwise(self.ends_q), pairwise(self.ends_k), strict=True):
            step = max(1, limit // (pair_bytes * max(1, d - c)))
            for start in range(a, b, step):
                stop = min(start + step, b)
                seen = d - c - (b - stop)
                if seen > 0:
                    own = TokenSpans((0, stop - start), (0, seen), self.block_size)
                    yield slice(start, stop), slice(c, c + seen), own

    @on_host
    def _per_query(self, of_sequence: object) -> Tensor:
        pairs = zip(pairwise(self.ends_q), pairwise(self.ends_k), strict=True)
        parts = [of_sequence(a, b, c, d) for (a, b), (c, d) in pairs]  # type: ignore[operator]
        return torch.cat(parts).long() if parts else torch.zeros(0, dtype=torch.int64)


def sequence_ends(
    q: Tensor, k: Tensor, ends_q: CuSeqlens | None, ends_k: CuSeqlens | None, *, batched: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cumulative lengths of queries and keys: those of a batch, or the given ones of packed sequences.

    Raises:
        ValueError: lengths are given for a batch, missing for packed sequences, or do not fit the tokens.
    """
    if batched:
        if ends_q is not None or ends_k is not None:
            raise ValueError("`cu_seqlens_q` and `cu_seqlens_k` go with packed inputs, which have no batch dimension")
        ends = [tuple([i * x.shape[1] for i in range(q.shape[0] + 1)]) for x in (q, k)]
        return ends[0], ends[1]
    if ends_q is None:
        raise ValueError("packed inputs need `cu_seqlens_q`, e.g. (0, tokens)")
    ends_q = host_lengths("cu_seqlens_q", ends_q)
    ends_k = ends_q if ends_k is None else host_lengths("cu_seqlens_k", ends_k)
    if len(ends_q) != len(ends_k) or (ends_q[-1], ends_k[-1]) != (len(q), len(k)):
        raise ValueError(
            f"`cu_seqlens_q` and `cu_seqlens_k` must end at {len(q)} and {len(k)} tokens, for the same number of "
            f"sequences, got {len(ends_q) - 1} to {ends_q[-1]} and {len(ends_k) - 1} to {ends_k[-1]}"
        )
    return ends_q, ends_k


def best_of(scores: Tensor, counts: Tensor, slots: int) -> Tensor:
    """Return (..., slots) int32: the best of the first `counts` (...) scores (..., width), ascending, then -1.

    Of equal scores the first one wins, and NaN ranks first.
    """
    width = scores.shape[-1]
    hidden = torch.arange(width, device=scores.device) >= counts[..., None]
    best = (
        (scores + 0.0).masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    )
    best = torch.where(best < counts[..., None], best, width).sort(-1).values
    best = torch.where(best < width, best, -1)
    return torch.nn.functional.pad(best, (0, slots - best.shape[-1]), value=-1).int()


def ascending(block_indices: Tensor) -> Tensor:
    """Return each row's numbers in ascending order, with -1 at the end."""
    most = torch.iinfo(block_indices.dtype).max
    rows = torch.where(block_indices < 0, most, block_indices).sort(-1).values
    return torch.where(rows == most, -1, rows)
