# SPDX-License-Identifier: Apache-2.0
"""Rows of a sharded layout: mapped to the columns of a buffer, and split into inner and edge rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynaxx.distributed.sharded import rows_of
from dynaxx.layout import BlockGrid, BlockLayout

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
