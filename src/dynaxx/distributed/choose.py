# SPDX-License-Identifier: Apache-2.0
"""`sequence_split`: assign the rows of a layout to ranks, balancing work and communication."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from dynaxx.arguments import typed
from dynaxx.distributed.group import Mesh, group_of
from dynaxx.distributed.split import SequenceSplit
from dynaxx.layout import BlockLayout

MAX_TOKENS = 1.05  # of a rank with a contiguous run, as a share of the mean
BLOCKS_PER_KV_BLOCK = 3.0  # visited blocks that take as long as receiving one kv block, measured on two GPUs


@dataclass(frozen=True)
class SplitCost:
    """Work and communication of a split for one layout, in visited blocks and kv blocks."""

    work: tuple[int, ...]  # visited blocks of each rank, over all heads
    received: tuple[int, ...]  # kv blocks that each rank visits but does not own
    total: float  # largest work plus the cost of the largest exchange, in visited blocks per head

    @property
    def imbalance(self) -> float:
        """Largest work divided by the mean work; 1.0 if all ranks have equal work."""
        return max(self.work) * len(self.work) / max(1, sum(self.work))


@typed
def sequence_split(layout: BlockLayout, mesh: Mesh | int, *, chunk: int | None = None) -> SequenceSplit:
    """Choose how to split a sequence over ranks for a layout: contiguous, zigzag, or dealt chunk by chunk.

    All ranks get equal numbers of tokens, up to one chunk, or up to 5 % if contiguous runs then have even work. The
    chosen split has the smallest sum of work and received blocks on the busiest rank. Every rank computes the same
    split without communication.

    Args:
        layout: layout of the whole sequence, with as many queries as keys.
        mesh: a one-dimensional DeviceMesh, a process group, or a number of ranks.
        chunk: tokens that stay together, a multiple of both block sizes; the larger block size by default.

    Raises:
        ValueError: the layout has different numbers of queries and keys, or chunks would cut blocks.
    """
    if layout.seqlen_q != layout.seqlen_k:
        raise ValueError(
            f"`layout` must have as many queries as keys, got {layout.seqlen_q} x {layout.seqlen_k}; pass "
            "`sparse_attention` a pair of splits"
        )
    ranks = mesh if isinstance(mesh, int) else dist.get_world_size(group_of(mesh))
    chunk = lcm(*layout.block_size) if chunk is None else chunk
    known = _splits.setdefault(layout, {})
    if (ranks, chunk) not in known:
        known[ranks, chunk] = _best(layout, ranks, chunk)
    return known[ranks, chunk]


def _best(layout: BlockLayout, ranks: int, chunk: int) -> SequenceSplit:
    seqlen = layout.seqlen_q
    candidates = [SequenceSplit.contiguous(seqlen, ranks, chunk), SequenceSplit.zigzag(seqlen, ranks, chunk)]
    candidates[0].check_block(layout.block_size[0])
    candidates[0].check_block(layout.block_size[1])
    rows = rows_work(layout)
    per_chunk = np.add.reduceat(rows, np.arange(0, len(rows), chunk // layout.block_size[0])) if len(rows) else rows
    candidates.append(SequenceSplit.dealt(seqlen, ranks, per_chunk.tolist(), chunk))
    even = SequenceSplit.even(seqlen, ranks, per_chunk.tolist(), chunk)
    if max(even.lengths) * ranks <= MAX_TOKENS * seqlen:
        candidates.append(even)
    return min(candidates, key=lambda split: split_cost(layout, split).total)


@typed
def split_cost(layout: BlockLayout, split: SequenceSplit) -> SplitCost:
    """Compute work and communication of a split. O(visited blocks); reads a layout back from a GPU."""
    q_block, kv_block = layout.block_size
    flat_rows, cols, _ = (x.cpu() for x in (layout.host or layout).entries())
    row_owner = _owners(split, q_block)
    kv_owner = _owners(split, kv_block)
    who = row_owner[flat_rows.numpy() % max(1, layout.q_blocks)]
    work = np.bincount(who, minlength=split.ranks)
    visited = np.zeros((split.ranks, layout.kv_blocks), dtype=np.bool_)
    visited[who, cols.numpy()] = True
    visited[kv_owner, np.arange(layout.kv_blocks)] = False
    received = visited.sum(1)
    heads = layout.layout_batch * layout.layout_heads
    total = float(work.max()) / heads + BLOCKS_PER_KV_BLOCK * float(received.max())
    return SplitCost(tuple(work.tolist()), tuple(received.tolist()), total)


def rows_work(layout: BlockLayout) -> NDArray[np.int64]:
    """Return the visited blocks of each row of q blocks, over batch and heads, (q_blocks,)."""
    return (layout.host or layout).kv_num_blocks.long().sum((0, 1)).cpu().numpy()


def _owners(split: SequenceSplit, block: int) -> NDArray[np.int64]:
    """Return the owner of each block of `block` tokens."""
    owners = np.repeat(np.asarray(split.owners, dtype=np.int64), split.chunk // block)
    return owners[: -(-split.seqlen // block)]


_splits: WeakKeyDictionary[BlockLayout, dict[tuple[int, int], SequenceSplit]] = WeakKeyDictionary()
