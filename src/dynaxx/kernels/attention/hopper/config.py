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


def forward_heads_together(seqlen_k: int, head_dim: int, kv_heads: int) -> int:
    """Return how many kv heads (of all batch entries) alternate in the forward: as many as fit in L2, a divisor.

    If rows have no keys in common, all 32 heads of 32k tokens at a time take 10 % more time than two.
    """
    most = max(1, (48 << 20) // (seqlen_k * head_dim * 4))
    return max(heads for heads in range(1, min(most, kv_heads) + 1) if kv_heads % heads == 0)


def fused_stages(head_dim: int) -> int:
    """Return the tiles in flight in one pass; at head_dim 64, the scores of the next tile are computed ahead."""
    return 3 if head_dim == 64 else 2


def backward_in_one_pass(kv_block: int, head_dim: int, programs: int, processors: int) -> bool:
    """Return whether one kernel computes dq, dk and dv: it needs two consumers of 64 keys and enough programs.

    With enough programs, all multiprocessors finish together: with 4 programs per multiprocessor, one pass is 4 to 10 %
    faster than two.
    """
    return head_dim <= 128 and kv_block == 128 and enough_for_one_pass(programs, processors)


def enough_for_one_pass(programs: int, processors: int) -> bool:
    """Return whether there are so many programs that all multiprocessors finish one pass together."""
    return programs > 3 * processors


REACH = 40  # blocks; see `backward_pieces`


def backward_pieces(group_size: int, programs: int, processors: int, fused: bool, narrow: bool = False) -> int:
    """Return the number of pieces into which the q heads of a group are divided, each a separate program per kv block.

    Processing fewer q heads at a time keeps their q, do and sums of dq in L2. On an H200, whole groups and pieces of 4,
    2 and 1 heads take 4.56, 3.43, 3.32 and 3.57 ms over random 15 % of 24k tokens with 28/4 heads; 0.778, 0.829, 0.728
    and 0.772 over 20 % of 8k; 2.54, 2.21, 2.11 and 2.16 over everything visible at 8k; and 7.13, 5.31, 4.76 and 5.12
    over 10 % of 32k with 32/4 heads. Over 15 % of 16k, whole groups and pieces of two take 4.65 and 3.40 ms with 64/4
    heads, 3.49 and 2.63 with 48/4, and 2.84 and 2.28 with 40/4.

    In a narrow layout, whose rows visit blocks up to `REACH` from the diagonal, programs that run at the same time
    share few queries, which fit in L2 for whole groups. On an H100, whole groups and pieces of two heads take 3.21 and
    3.35 ms over a window of 1,024 in 32k tokens with 32/8 heads, and 9.52 and 9.86 ms over a window of 4,096; and 3.04
    and 3.24 ms over the former with 28/4 heads.

    Args:
        group_size: q heads per kv head.
        programs: number of programs for whole groups.
        processors: number of multiprocessors.
        fused: whether one kernel may compute all gradients.
        narrow: whether the layout is narrow.
    """
    if narrow and fused and enough_for_one_pass(programs, processors):
        return 1
    if fused and group_size >= 4 and programs * group_size >= 4 * processors:
        return (group_size + 1) // 2
    return group_size if programs < 2 * processors else 1


def backward_heads_together(seqlen_q: int, head_dim: int, kv_heads: int) -> int:
    """Return how many kv heads alternate in one pass, longest column first.

    With more heads, programs finish together; with fewer, the queries, gradients and sums of dq of these heads stay in
    L2. The best measured values are 1 of 8 heads for 32k queries, and 4 for 8k.
    """
    return max(1, min(kv_heads, (32 << 20) // (seqlen_q * head_dim * 8)))


def backward_ending(kv_blocks: int, heads: int, processors: int) -> int:
    """Return how many of the last kv blocks of each head run at the end: two per multiprocessor, 0 for short heads."""
    return min(kv_blocks // 8, -(-2 * processors // heads)) if kv_blocks >= 128 else 0


def backward_dq_stages(head_dim: int) -> tuple[int, int]:
    """Return the tiles of k and of v in flight in the dq kernel, next to 128 queries and their gradients."""
    return (2, 1) if head_dim == 256 else (3, 2)


def selected_consumers(group_size: int, kv_block: int) -> int:
    """Return the consumers per program of selected attention by query, 64 rows each; 0 for groups that run by key.

    Three consumers read less and are 12 % faster than two. With larger blocks they spill, and with groups of 4 they
    would unite 48 positions, more than a union has bits for.
    """
    return (3 if kv_block <= 64 and group_size > 4 else 2) if group_size in (4, 8, 16, 32, 64) else 0
