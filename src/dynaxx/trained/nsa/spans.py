# SPDX-License-Identifier: Apache-2.0
"""Sizes of native sparse attention (NSA), and positions of compressed tokens and selection blocks in packed sequences.

All sequences are packed: their tokens follow one another on one axis, and a batch is a set of sequences of equal
length. The queries of a sequence are aligned to its last keys, so a decode step is a sequence with one query.

Legend: p = position of a query among the keys of its sequence, i = compressed token, j = selection block, each counted
from the start of its sequence. Compressed token i covers keys [i * cmp_stride, i * cmp_stride + cmp_block) and becomes
visible at its last key. Selection block j covers keys [j * slc_block, (j + 1) * slc_block).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.block_layout import BlockLayout
from dynaxx.layout.cache import LayoutCache
from dynaxx.layout.grid import BLOCK_SIZES
from dynaxx.layout.host import never_traced, on_host
from dynaxx.layout.packed import CuSeqlens, host_lengths
from dynaxx.lazy import lazy
from dynaxx.settings import Count, Positive, Range, check_settings

MAX_BLOCKS = 1 << 16  # upper bound for `slc_count`


@typed
@dataclass(frozen=True)
class NsaSizes:
    """Sizes of the three branches, in tokens and blocks. The defaults are those of the paper (arXiv 2502.11089).

    Args:
        cmp_block: tokens per compressed token (l in the paper); a multiple of cmp_stride, at most slc_block.
        cmp_stride: tokens between the starts of neighbouring compressed tokens (d); divides slc_block.
        slc_block: tokens per selection block (l'): 16, 32, 64 or 128.
        slc_count: blocks that each query selects (n), including forced blocks.
        first_blocks: number of blocks at the start of the sequence that are always selected.
        local_blocks: number of blocks, ending with the query's own block, that are always selected.
        window: keys that the window branch sees, including the query's own key (w).
        pool: how the scores of compressed tokens become the score of a block: "sum" (eq. 9) or "max".

    Raises:
        ValueError: sizes do not divide one another, or there are more forced blocks than selected ones.
    """

    cmp_block: Positive = 32
    cmp_stride: Positive = 16
    slc_block: int = 64
    slc_count: Annotated[int, Range(1, MAX_BLOCKS)] = 16
    first_blocks: Count = 1
    local_blocks: Count = 2
    window: Annotated[int, Range(1, (1 << 31) - 1)] = 512
    pool: Literal["sum", "max"] = "sum"

    def __post_init__(self) -> None:
        """Check that the sizes fit each other."""
        check_settings(self, NsaSizes)
        if self.slc_block not in BLOCK_SIZES:
            raise ValueError(f"`slc_block` must be one of {BLOCK_SIZES}, got {self.slc_block}")
        if self.cmp_block % self.cmp_stride or self.slc_block % self.cmp_stride:
            raise ValueError(
                "`cmp_stride` must divide `cmp_block` and `slc_block`, "
                f"got {self.cmp_stride} for {self.cmp_block} and {self.slc_block}"
            )
        if self.cmp_block > self.slc_block:
            raise ValueError(f"`cmp_block` must be at most slc_block = {self.slc_block}, got {self.cmp_block}")
        if self.first_blocks + self.local_blocks > self.slc_count:
            raise ValueError(
                f"`slc_count` must cover the forced blocks, {self.first_blocks} first and {self.local_blocks} local, "
                f"got {self.slc_count}"
            )

    def compressed(self, seqlen: int) -> int:
        """Return how many compressed tokens `seqlen` keys have; only complete windows count."""
        return 0 if seqlen < self.cmp_block else (seqlen - self.cmp_block) // self.cmp_stride + 1


class EqualLengths(NamedTuple):
    """The lengths of sequences that are all equally long, so that they form a batch."""

    num_seqs: int
    seqlen_q: int
    seqlen_k: int


@dataclass(frozen=True, eq=False)
class NsaSpans:
    """Positions of everything for sequences of given lengths. Rows index the packed q, k and compressed k."""

    sizes: NsaSizes
    ends_q: tuple[int, ...]  # (num_seqs + 1,) cumulative numbers of queries
    ends_k: tuple[int, ...]  # (num_seqs + 1,) cumulative numbers of keys
    ends_cmp: tuple[int, ...]  # (num_seqs + 1,) cumulative numbers of compressed tokens
    last_key: Tensor  # (tokens_q,) int32, row of the query's own key; the row before its sequence if p < 0
    first_block: Tensor  # (tokens_q,) int32, row in block_start of block 0 of the query's sequence
    num_blocks: Tensor  # (tokens_q,) int32, selection blocks that the query may see: p // slc_block + 1
    first_cmp: Tensor  # (tokens_q,) int32, row of compressed token 0 of the query's sequence
    num_cmp: Tensor  # (tokens_q,) int32, compressed tokens that the query may see
    block_start: Tensor  # (blocks,) int32, first key row of each selection block of all sequences
    block_end: Tensor  # (blocks,) int32, last key row + 1 of each selection block
    cmp_start: Tensor  # (tokens_cmp,) int32, first key row of each compressed token
    layouts: dict[int, BlockLayout] = field(default_factory=dict)  # layouts over compressed tokens, by block size

    @lazy
    def max_blocks(self) -> int:
        """Return the number of selection blocks of the longest sequence."""
        return max((-(-(b - a) // self.sizes.slc_block) for a, b in pairwise(self.ends_k)), default=0)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.last_key.device

    @lazy
    def equal_lengths(self) -> EqualLengths | None:
        """Return the lengths if all sequences have the same ones, else None."""
        lengths = {(b - a, d - c) for (a, b), (c, d) in zip(pairwise(self.ends_q), pairwise(self.ends_k), strict=True)}
        return EqualLengths(len(self.ends_q) - 1, *lengths.pop()) if len(lengths) == 1 else None


@never_traced
@typed
def nsa_spans(
    sizes: NsaSizes,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    device: torch.device | str = "cpu",
) -> NsaSpans:
    """Compute the positions of everything in packed sequences, on the host, cached by value.

    Args:
        sizes: sizes of the branches.
        cu_seqlens_q: (num_seqs + 1,) cumulative numbers of queries, starting at 0; sequences may be empty. Lengths on a
            GPU are read back.
        cu_seqlens_k: (num_seqs + 1,) cumulative numbers of keys; defaults to `cu_seqlens_q`.
        device: device of q and k.

    Returns:
        Positions of the queries, keys, compressed tokens and selection blocks of each sequence, for `select_nsa`.

    Raises:
        ValueError: lengths do not start at 0, decrease, or describe different numbers of sequences.
    """
    ends_q = host_lengths("cu_seqlens_q", cu_seqlens_q)
    ends_k = ends_q if cu_seqlens_k is None else host_lengths("cu_seqlens_k", cu_seqlens_k)
    if len(ends_q) != len(ends_k):
        raise ValueError(
            "`cu_seqlens_q` and `cu_seqlens_k` must describe the same number of sequences, "
            f"got {len(ends_q) - 1} and {len(ends_k) - 1}"
        )
    return _cached_spans(sizes, ends_q, ends_k, torch.device(device))


@LayoutCache
@on_host
def _cached_spans(sizes: NsaSizes, ends_q: tuple[int, ...], ends_k: tuple[int, ...], device: torch.device) -> NsaSpans:
    lengths_q = torch.tensor(ends_q, dtype=torch.int64).diff()
    lengths_k = torch.tensor(ends_k, dtype=torch.int64).diff()
    per_query = lambda values: torch.repeat_interleave(torch.as_tensor(values, dtype=torch.int64), lengths_q)
    starts_k = torch.tensor(ends_k[:-1], dtype=torch.int64)
    within = torch.arange(ends_q[-1]) - per_query(ends_q[:-1])
    position = within + per_query(lengths_k - lengths_q)
    counts_cmp = [sizes.compressed(length) for length in lengths_k.tolist()]
    counts_blocks = [-(-length // sizes.slc_block) for length in lengths_k.tolist()]
    ends_cmp = tuple(accumulate(counts_cmp, initial=0))
    ends_blocks = tuple(accumulate(counts_blocks, initial=0))
    block_start = _starts(ends_blocks, starts_k, sizes.slc_block)
    block_end = torch.minimum(
        block_start + sizes.slc_block,
        torch.repeat_interleave(starts_k + lengths_k, torch.tensor(counts_blocks, dtype=torch.int64)),
    )
    seen_cmp = torch.div(position + 1 - sizes.cmp_block, sizes.cmp_stride, rounding_mode="floor") + 1
    place = lambda x: x.to(torch.int32).to(device, non_blocking=True)
    return NsaSpans(
        sizes=sizes,
        ends_q=ends_q,
        ends_k=ends_k,
        ends_cmp=ends_cmp,
        last_key=place(position.clamp(min=-1) + per_query(starts_k)),
        first_block=place(per_query(ends_blocks[:-1])),
        num_blocks=place(torch.div(position, sizes.slc_block, rounding_mode="floor").add(1).clamp(min=0)),
        first_cmp=place(per_query(ends_cmp[:-1])),
        num_cmp=place(seen_cmp.clamp(min=0)),
        block_start=place(block_start),
        block_end=place(block_end),
        cmp_start=place(_starts(ends_cmp, starts_k, sizes.cmp_stride)),
    )


def _starts(ends: tuple[int, ...], starts_k: Tensor, step: int) -> Tensor:
    """Return the first key row of each item, when the items of a sequence lie `step` keys apart."""
    counts = torch.tensor(ends, dtype=torch.int64, device="cpu").diff()
    within = torch.arange(ends[-1], device="cpu") - torch.repeat_interleave(
        torch.tensor(ends[:-1], dtype=torch.int64, device="cpu"), counts
    )
    return torch.repeat_interleave(starts_k, counts) + within * step
