# SPDX-License-Identifier: Apache-2.0
"""`SequenceSplit`: which rank owns which tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed
from dynaxx.lazy import lazy


@typed
@dataclass(frozen=True)
class SequenceSplit:
    """A sequence cut into chunks of equal length, each owned by one rank.

    A rank stores the tokens of its chunks one after another, in ascending order. The last chunk may be shorter, and a
    rank may own nothing.

    Args:
        seqlen: tokens of the whole sequence, or of the packed axis.
        chunk: tokens per chunk; a multiple of both block sizes of every layout that is used with the split.
        owners: the rank that owns each of the ceil(seqlen / chunk) chunks.
        ranks: number of ranks that share the sequence.

    Raises:
        ValueError: a size is below 1, or `owners` has the wrong length or contains an invalid rank.
    """

    seqlen: int
    chunk: int
    owners: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        """Check the lengths, and that every chunk has an owner."""
        if self.seqlen < 0 or self.chunk < 1 or self.ranks < 1:
            raise ValueError(
                f"`seqlen` must be >= 0, `chunk` and `ranks` >= 1, got {self.seqlen}, {self.chunk} and {self.ranks}"
            )
        if len(self.owners) != -(-self.seqlen // self.chunk):
            raise ValueError(
                f"`owners` must name a rank for each of the {-(-self.seqlen // self.chunk)} chunks, "
                f"got {len(self.owners)}"
            )
        if any(not 0 <= owner < self.ranks for owner in self.owners):
            raise ValueError(f"`owners` must be ranks from 0 to {self.ranks - 1}, got {self.owners}")
        # Plans are looked up by split in every call, and a dealt split has thousands of owners.
        object.__setattr__(self, "_hash", hash((self.seqlen, self.chunk, self.owners, self.ranks)))

    def __hash__(self) -> int:
        """Return the hash of the fields, computed once."""
        return self._hash  # type: ignore[attr-defined]

    # ---- constructors ----------------------------------------------------------------------------------------------

    @classmethod
    def contiguous(cls, seqlen: int, ranks: int, chunk: int = 128) -> SequenceSplit:
        """Give each rank one contiguous run of chunks; lengths differ by at most one chunk. Best for windows."""
        seqlen, ranks, chunks = _sizes(seqlen, ranks, chunk)
        return cls(seqlen, chunk, tuple(i * ranks // chunks for i in range(chunks)), ranks)

    @classmethod
    def even(cls, seqlen: int, ranks: int, work: Sequence[float], chunk: int = 128) -> SequenceSplit:
        """Give each rank one contiguous run of chunks with about the same work, whatever its length.

        Args:
            seqlen: tokens of the whole sequence.
            ranks: number of ranks.
            work: work of each chunk, in any unit.
            chunk: tokens per chunk.
        """
        seqlen, ranks, chunks = _sizes(seqlen, ranks, chunk)
        _check_work(work, chunks)
        total, done = sum(work), 0.0
        owners: list[int] = []
        for own in work:
            middle = (done + own / 2) / total if total else len(owners) / chunks
            owners.append(min(ranks - 1, int(middle * ranks)))
            done += own
        return cls(seqlen, chunk, tuple(owners), ranks)

    @classmethod
    def zigzag(cls, seqlen: int, ranks: int, chunk: int = 128) -> SequenceSplit:
        """Cut the sequence into 2 * ranks runs and give rank r the runs r and 2 * ranks - 1 - r.

        Under a causal mask, early runs have little work and late runs have much; the sum is equal for all ranks.
        """
        seqlen, ranks, chunks = _sizes(seqlen, ranks, chunk)
        runs = [i * 2 * ranks // chunks for i in range(chunks)]
        return cls(seqlen, chunk, tuple(min(run, 2 * ranks - 1 - run) for run in runs), ranks)

    @classmethod
    def dealt(cls, seqlen: int, ranks: int, work: Sequence[float], chunk: int = 128) -> SequenceSplit:
        """Assign chunks so that work is balanced and the numbers of chunks differ by at most one.

        Chunks are assigned in descending order of work, each to the rank with the least work that still has room.

        Args:
            seqlen: tokens of the whole sequence.
            ranks: number of ranks.
            work: work of each chunk, in any unit.
            chunk: tokens per chunk.
        """
        seqlen, ranks, chunks = _sizes(seqlen, ranks, chunk)
        _check_work(work, chunks)
        room = [chunks // ranks + (rank < chunks % ranks) for rank in range(ranks)]
        done, owners = [0.0] * ranks, [0] * chunks
        for i in sorted(range(chunks), key=lambda i: (-work[i], i)):
            rank = min((r for r in range(ranks) if room[r]), key=lambda r: (done[r], r))
            owners[i], room[rank], done[rank] = rank, room[rank] - 1, done[rank] + work[i]
        return cls(seqlen, chunk, tuple(owners), ranks)

    # ---- access ----------------------------------------------------------------------------------------------------

    def length(self, rank: int) -> int:
        """Return the number of tokens that a rank owns."""
        return self.lengths[rank]

    @lazy
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank."""
        found = [0] * self.ranks
        for i, owner in enumerate(self.owners):
            found[owner] += min(self.chunk, self.seqlen - i * self.chunk)
        return tuple(found)

    @property
    def last_owner(self) -> int:
        """Rank that owns the last chunk, which may be short; 0 for an empty sequence."""
        return self.owners[-1] if self.owners else 0

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """Return (first, last + 1) token of each run of neighbouring chunks that a rank owns, in order."""
        return self._runs[rank]

    @lazy
    def _runs(self) -> list[list[tuple[int, int]]]:
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for owner, group in groupby(enumerate(self.owners), key=lambda pair: pair[1]):
            chunks = [i for i, _ in group]
            found[owner].append((chunks[0] * self.chunk, min((chunks[-1] + 1) * self.chunk, self.seqlen)))
        return found

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the position in the whole sequence of each token of a rank, (length,) int64; for rotary embeddings."""
        runs = [torch.arange(a, b, device=device) for a, b in self.runs(rank)]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *runs])

    def blocks(self, rank: int, block: int) -> Tensor:
        """Return the blocks of `block` tokens that a rank owns, ascending, (n,) int64 on the host."""
        self.check_block(block)
        runs = [torch.arange(a // block, -(-b // block), device="cpu") for a, b in self.runs(rank)]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *runs])

    def check_block(self, block: int) -> None:
        """Raise ValueError if blocks of `block` tokens would straddle two ranks."""
        if self.chunk % block:
            raise ValueError(
                f"`split` must have chunks that are a multiple of the layout's block size {block}, got {self.chunk}"
            )

    def check_shards(self, rank: int, **tensors: Tensor) -> None:
        """Raise ValueError unless all tensors are (batch, own tokens, heads, dim) of this rank."""
        for name, x in tensors.items():
            if x.ndim != 4 or x.shape[1] != self.length(rank):
                raise ValueError(
                    f"`{name}` must be (batch, own tokens = {self.length(rank)}, heads, dim), got {tuple(x.shape)}"
                )

    @typed
    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Extract a rank's tokens from a tensor of the whole sequence. Differentiable.

        Args:
            x: a tensor with `seqlen` entries along `dim`.
            rank: the rank whose tokens to extract.
            dim: token dimension: 1 for (batch, seqlen, ...), 0 for packed (tokens, ...).

        Returns:
            A contiguous tensor with `length(rank)` entries along `dim`.

        Raises:
            ValueError: `x` has another number of tokens.
        """
        self.check_tokens(x, self.seqlen, dim)
        parts = [x.narrow(dim, a, b - a) for a, b in self.runs(rank)] or [x.narrow(dim, 0, 0)]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    @typed
    def join(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Join the shards of all ranks into the whole sequence; inverse of `shard`. Differentiable.

        Args:
            shards: shards of ranks 0, 1, ... in order.
            dim: token dimension.
        """
        if len(shards) != self.ranks:
            raise ValueError(f"`shards` must have one entry per rank, {self.ranks}, got {len(shards)}")
        pieces: list[tuple[int, Tensor]] = []
        for rank, x in enumerate(shards):
            self.check_tokens(x, self.length(rank), dim)
            done = 0
            for a, b in self.runs(rank):
                pieces.append((a, x.narrow(dim, done, b - a)))
                done += b - a
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        return torch.cat(ordered, dim) if ordered else shards[0].clone()

    @staticmethod
    def check_tokens(x: Tensor, tokens: int, dim: int) -> None:
        """Raise ValueError if a tensor has another number of tokens along `dim`."""
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
            raise ValueError(f"`x` must have {tokens} tokens along dim {dim}, got shape {tuple(x.shape)}")


def _check_work(work: Sequence[float], chunks: int) -> None:
    if len(work) != chunks:
        raise ValueError(f"`work` must have one number for each of the {chunks} chunks, got {len(work)}")


def _sizes(seqlen: int, ranks: int, chunk: int) -> tuple[int, int, int]:
    """Check sizes; return the sequence length, the number of ranks and the number of chunks."""
    seqlen, ranks, chunk = as_integer("seqlen", seqlen), as_integer("ranks", ranks), as_integer("chunk", chunk)
    if seqlen < 0 or ranks < 1 or chunk < 1:
        raise ValueError(f"`seqlen` must be >= 0, `ranks` and `chunk` >= 1, got {seqlen}, {ranks} and {chunk}")
    return seqlen, ranks, -(-seqlen // chunk)
