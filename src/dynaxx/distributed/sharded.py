# SPDX-License-Identifier: Apache-2.0
"""`ShardedLayout`: the rows of a global layout that one rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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


MAX_EDGE_ROWS = 0.25  # with a larger share of edge rows, a separate call for the inner rows does not pay


class SplitRows(NamedTuple):
    """Inner rows, which visit only own blocks, and edge rows, which also visit blocks of other ranks."""

    inner: BlockLayout  # all own rows over own tokens; edge rows are empty
    edge: BlockLayout  # edge rows over the tokens of the whole sequence
    rows: Tensor  # (n,) int64, own queries of edge rows
    run: slice | None  # the same queries, if they are neighbours
    own_blocks: NDArray[np.int64]  # own kv blocks that edge rows visit, ascending
    rest: tuple[slice, BlockLayout] | None  # the queries that are not in `run`, if neighbours, and their layout


def split_rows(rows: BlockLayout, own_blocks: NDArray[np.int64], own_tokens: int) -> SplitRows | None:
    """Split the rows of a rank; return None if too many of them visit blocks of other ranks.

    Args:
        rows: own rows over the tokens of the whole sequence.
        own_blocks: own kv blocks, ascending.
        own_tokens: number of tokens in own blocks.
    """
    source = rows.host or rows
    flat_rows, cols, mask_ids = source.entries()
    is_own = torch.zeros(max(1, source.kv_blocks), dtype=torch.bool, device=cols.device)
    is_own[torch.from_numpy(own_blocks).to(cols.device)] = True
    row = flat_rows % max(1, source.q_blocks)
    is_edge = torch.zeros(max(1, source.q_blocks), dtype=torch.bool, device=cols.device)
    is_edge[row[~is_own[cols]]] = True
    edge = is_edge.nonzero().flatten()
    if len(edge) > MAX_EDGE_ROWS * source.q_blocks:
        return None
    q_block = rows.block_size[0]
    tokens = (edge[:, None] * q_block + torch.arange(q_block, device=edge.device)).flatten()
    tokens = tokens[tokens < rows.seqlen_q]
    kept = ~is_edge[row]
    grid = BlockGrid(rows.seqlen_q, rows.seqlen_k, rows.block_size, causal=False)
    shape = {"layout_batch": rows.layout_batch, "layout_heads": rows.layout_heads}
    inner = BlockLayout.from_entries(grid, flat_rows[kept], cols[kept], mask_ids[kept], source.masks, **shape)
    visited = np.unique(cols[~kept & is_own[cols]].cpu().numpy())
    inner = with_columns(inner, own_blocks, own_tokens)
    rest = _rest(inner, edge, _run(tokens))
    return SplitRows(
        inner.to(rows.device),
        rows_of(source, edge, len(tokens)).to(rows.device),
        tokens.to(rows.device),
        _run(tokens),
        visited.astype(np.int64),
        None if rest is None else (rest[0], rest[1].to(rows.device)),
    )


def _rest(inner: BlockLayout, edge: Tensor, run: slice | None) -> tuple[slice, BlockLayout] | None:
    """Return the inner queries as a slice, and their layout; None if there are no edge rows, or they are in between."""
    if run is None or (run.start and run.stop < inner.seqlen_q) or run.stop - run.start == inner.seqlen_q:
        return None
    kept = slice(0, run.start) if run.start else slice(run.stop, inner.seqlen_q)
    rows = torch.arange(inner.q_blocks, device="cpu")
    rows = rows[~torch.isin(rows, edge.cpu())]
    return kept, rows_of(inner, rows, kept.stop - kept.start)


def _run(tokens: Tensor) -> slice | None:
    """Return ascending numbers as a slice, or None if they are not consecutive."""
    if not len(tokens):
        return None
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else None


def split_columns(rows: BlockLayout, own_blocks: NDArray[np.int64]) -> tuple[BlockLayout, BlockLayout]:
    """Return the same rows with only the kv blocks `own_blocks`, and with all others; on the host if it has a copy."""
    source = rows.host or rows
    flat_rows, cols, mask_ids = source.entries()
    is_own = torch.zeros(max(1, source.kv_blocks), dtype=torch.bool, device=cols.device)
    is_own[torch.from_numpy(own_blocks).to(cols.device)] = True
    grid = BlockGrid(rows.seqlen_q, rows.seqlen_k, rows.block_size, causal=False)
    shape = {"layout_batch": rows.layout_batch, "layout_heads": rows.layout_heads}
    own, others = (
        BlockLayout.from_entries(grid, flat_rows[kept], cols[kept], mask_ids[kept], source.masks, **shape)
        for kept in (is_own[cols], ~is_own[cols])
    )
    return own.to(rows.device), others.to(rows.device)


def with_columns(rows: BlockLayout, order: NDArray[np.int64], tokens: int) -> BlockLayout:
    """Return the same rows with the kv blocks `order` as columns, in this order; they hold `tokens` tokens."""
    source = rows.host or rows
    column = np.full(max(1, source.kv_blocks), -1, dtype=np.int64)
    column[order] = np.arange(len(order))
    flat_rows, cols, mask_ids = source.entries()
    cols = torch.from_numpy(column).to(cols.device)[cols]
    grid = BlockGrid(rows.seqlen_q, tokens, rows.block_size, causal=False)
    batch, heads = rows.layout_batch, rows.layout_heads
    moved = BlockLayout.from_entries(
        grid, flat_rows, cols, mask_ids, source.masks, layout_batch=batch, layout_heads=heads
    )
    return moved.to(rows.device)
