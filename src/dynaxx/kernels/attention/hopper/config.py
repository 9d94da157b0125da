# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Hopper kernels: pure functions of shapes. Queries are processed in rows of 64, wgmma's M."""

from __future__ import annotations

BACKWARD_STAGES = 2  # tiles of q and do in flight in the backward over kv blocks
WIDTHS = (64, 128, 256)


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile for `head_dim`. TMA loads columns beyond head_dim as zeros and never stores them."""
    return next(width for width in WIDTHS if head_dim <= width)


def forward_step(head_dim: int, kv_block: int, consumers: int) -> int:
    """Return the keys per step of the forward: one block, or 128 if two consumers fill the multiprocessor anyway.

    Above head_dim 128, return 64, because a row's result takes half of a thread's registers.
    """
    if head_dim > 128:
        return 64
    return 128 if consumers == 2 else kv_block


def forward_stages(head_dim: int, consumers: int) -> int:
    """Return the steps of k and v in flight in the forward: as many as fit next to one or two rows of queries."""
    return (6 if consumers == 2 else 4) if head_dim == 64 else 2


def fused_stages(head_dim: int) -> int:
    """Return the tiles in flight in one pass; at head_dim 64, the scores of the next tile are computed ahead."""
    return 3 if head_dim == 64 else 2


def columns_added(columns: int) -> int:
    """Return the columns of 64 rows of dq that one instruction adds to the sums."""
    return 16 if columns % 64 else columns // 2


def backward_in_one_pass(kv_block: int, head_dim: int, entries: float, programs: int, processors: int) -> bool:
    """Return whether one kernel computes dq, dk and dv: it needs two consumers of 64 keys.

    `programs` counts kv blocks and q heads; fewer than multiprocessors finish earlier in two passes. `entries` is the
    mean number of blocks per row: with few of them, the sums of dq take longer to write and read than it takes to
    compute the scores twice. On an H200, two passes over 2 to 4 random blocks per row take 18 % less time for 28/4
    heads of 96 and 10 % for 128, but 15 % more for 64, and 7 to 11 % more for 28/2 and 16/2 heads of 72.
    """
    if head_dim > 128 or kv_block != 128 or programs < processors:
        return False
    few = next(blocks for width, blocks in ((64, 0.0), (80, 2.0), (96, 4.5), (128, 2.5)) if head_dim <= width)
    return entries > few


def backward_heads_together(seqlen_q: int, head_dim: int, kv_heads: int) -> int:
    """Return how many kv heads alternate in one pass, longest column first.

    With more heads, programs finish together; with fewer, the queries, gradients and sums of dq of these heads stay in
    L2. The best measured values are 1 of 8 heads for 32k queries, and 4 for 8k.
    """
    return max(1, min(kv_heads, (32 << 20) // (seqlen_q * head_dim * 8)))


def backward_ending(kv_blocks: int, heads: int, processors: int) -> int:
    """Return how many of the last kv blocks of each head run at the end: two per multiprocessor, 0 for short heads."""
    return min(kv_blocks // 8, -(-2 * processors // heads)) if kv_blocks >= 128 else 0


def backward_dq_stages(head_dim: int, consumers: int) -> tuple[int, int]:
    """Return the tiles of k and of v in flight in the dq kernel, next to 64 queries and their gradients per consumer.

    With one consumer, fewer tiles let more programs fit on a multiprocessor: 0.419 instead of 0.439 ms for 12 heads of
    128 over 10 % of 16k, 0.092 instead of 0.106 ms for 16 heads of 64 over 20 % of 8k.
    """
    if consumers == 1 and head_dim <= 128:
        return (2, 1) if head_dim == 64 else (2, 2)
    return (2, 1) if head_dim == 256 else (3, 2)


def backward_dq_registers(head_dim: int, consumers: int) -> int:
    """Return the registers per thread of the dq kernel, so that as many programs fit as its tiles allow."""
    if consumers == 2 or head_dim == 256:
        return 168
    return 80 if head_dim == 64 else 128


def portable_backward_is_faster(group_size: int, q_block: int, head_dim: int, programs: int, processors: int) -> bool:
    """Return whether the portable backward takes less time: many rows of 64 queries that no two heads share.

    On an H200, ours and the portable one take 10.2 and 8.9 ms over 64 of 1,713 blocks with 7 heads of 128, 2.76 and
    2.50 over 10 % of 32k with 16, 2.02 and 1.70 over 40 % of 4 x 3,916 tokens with 24 and without a causal mask; but
    0.166 and 0.193 over 30 % of 4k with 16 heads, and 1.71 and 1.79 over 15 % of 16k with 28/4.
    """
    return group_size == 1 and q_block == 64 and 64 < head_dim <= 128 and programs > 16 * processors


def selected_consumers(group_size: int, kv_block: int) -> int:
    """Return the consumers per program of selected attention by query, 64 rows each; 0 for groups that run by key.

    Three consumers read less and are 12 % faster than two. With larger blocks they spill, and with groups of 4 they
    would unite 48 positions, more than a union has bits for.
    """
    return (3 if kv_block <= 64 and group_size > 4 else 2) if group_size in (4, 8, 16, 32, 64) else 0
