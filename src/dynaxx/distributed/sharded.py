# SPDX-License-Identifier: Apache-2.0
"""`ShardedLayout`: the rows of a global layout that one rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout import BlockGrid, BlockLayout


@typed
@dataclass(frozen=True, eq=False)
class ShardedLayout:
    """One rank's rows of q blocks, with the kv blocks of the whole sequence as columns.

    Args:
        rows: layout whose seqlen_q is the number of own queries, and whose seqlen_k is that of the whole sequence.
        q_split: which rank owns which queries.
        kv_split: which rank owns which keys; the same object as `q_split` for self-attention.
        rank: the rank that computes the rows.

    Raises:
        ValueError: lengths, ranks or block sizes do not match.
    """

    rows: BlockLayout
    q_split: SequenceSplit
    kv_split: SequenceSplit
    rank: int

    def __post_init__(self) -> None:
        """Check that both splits have the same ranks and that the layout has this rank's rows."""
        if self.q_split.ranks != self.kv_split.ranks or not 0 <= self.rank < self.q_split.ranks:
            raise ValueError(
                "`q_split` and `kv_split` must have equal numbers of ranks, and `rank` must be one of them, "
                f"got {self.q_split.ranks}, {self.kv_split.ranks} and rank {self.rank}"
            )
        wanted = (self.q_split.length(self.rank), self.kv_split.seqlen)
        if (self.rows.seqlen_q, self.rows.seqlen_k) != wanted:
            raise ValueError(
                f"`rows` must be for {wanted[0]} own queries and {wanted[1]} keys, "
                f"got {self.rows.seqlen_q} and {self.rows.seqlen_k}"
            )
        self.q_split.check_block(self.rows.block_size[0])
        self.kv_split.check_block(self.rows.block_size[1])

    @classmethod
    @typed
    def of(
        cls,
        layout: BlockLayout,
        q_split: SequenceSplit,
        rank: int,
        kv_split: SequenceSplit | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> ShardedLayout:
        """Extract a rank's rows from a layout of the whole sequence. O(visited blocks of these rows).

        Args:
            layout: layout of the whole sequence or of a packed batch, on any device.
            q_split: which rank owns which queries.
            rank: the rank whose rows to extract.
            kv_split: which rank owns which keys; `q_split` by default.
            device: device of the rows, that of the layout by default. From a layout on the host, a GPU gets only the
                rows of its rank.
        """
        kv_split = q_split if kv_split is None else kv_split
        if (q_split.seqlen, kv_split.seqlen) != (layout.seqlen_q, layout.seqlen_k):
            raise ValueError(
                f"`layout` must be for the {q_split.seqlen} queries and {kv_split.seqlen} keys of the split, "
                f"got {layout.seqlen_q} x {layout.seqlen_k}"
            )
        own = q_split.blocks(rank, layout.block_size[0])
        rows = rows_of(layout, own, q_split.length(rank))
        return cls(rows if device is None else rows.to(device), q_split, kv_split, rank)

    @property
    def device(self) -> torch.device:
        """Return the device of the rows."""
        return self.rows.device


def rows_of(layout: BlockLayout, rows: Tensor, tokens: int) -> BlockLayout:
    """Return a layout of the given rows of q blocks, in their order, as rows 0, 1, ... of `tokens` queries.

    The result is built on the host if the layout has a host copy, so that its host-side metadata is available.
    """
    source = layout.host or layout
    indptr = source.kv_indptr
    rows = rows.to(indptr.device)
    starts, counts = indptr[..., rows].flatten().long(), source.kv_num_blocks[..., rows].flatten().long()
    ends = counts.cumsum(0)
    total = int(ends[-1]) if counts.numel() else 0
    flat_rows = torch.repeat_interleave(torch.arange(counts.numel(), device=indptr.device), counts, output_size=total)
    slot = torch.arange(total, device=indptr.device) + (starts - (ends - counts))[flat_rows]
    taken = BlockLayout.from_entries(
        BlockGrid(tokens, layout.seqlen_k, layout.block_size, causal=False),
        flat_rows,
        source.kv_indices[slot].long(),
        source.kv_masks[slot].long(),
        source.masks,
        layout_batch=layout.layout_batch,
        layout_heads=layout.layout_heads,
    )
    return taken.to(layout.device)
