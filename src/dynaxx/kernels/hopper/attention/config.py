# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Hopper kernels: pure functions of shapes. Queries go in rows of 64, wgmma's M."""

from __future__ import annotations

WIDTHS = (64, 128, 256)


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile for `head_dim`. TMA loads those beyond head_dim as zeros and never stores them."""
    return next(width for width in WIDTHS if head_dim <= width)


def forward_step(head_dim: int, kv_block: int, consumers: int) -> int:
    """Return keys per step of the forward: one block, or two where two consumers fill the multiprocessor anyway.

    Half a block of 128 where a row's result takes half of a thread's registers.
    """
    if head_dim > 128:
        return 64
    return 128 if consumers == 2 else kv_block


def forward_stages(head_dim: int, consumers: int) -> int:
    """Return steps of keys and values in flight in the forward: as many as fit next to two rows of queries, or one."""
    return (6 if consumers == 2 else 4) if head_dim == 64 else 2


def forward_heads_together(seqlen_k: int, head_dim: int, kv_heads: int) -> int:
    """Return how many kv heads (of all batch entries) alternate in the forward, a divisor: as many as L2 has room for.

    Without keys in common, all 32 heads of 32k tokens at a time took 10 % more time than two.
    """
    most = max(1, (48 << 20) // (seqlen_k * head_dim * 4))
    return max(heads for heads in range(1, min(most, kv_heads) + 1) if kv_heads % heads == 0)


def backward_stages(head_dim: int) -> int:
    """Return tiles of q and do in flight in the backward over kv blocks."""
    return 2


def fused_stages(head_dim: int) -> int:
    """Return tiles in flight in one pass, where at head_dim 64 the scores of the next tile are computed ahead."""
    return 3 if head_dim == 64 else 2


def backward_in_one_pass(kv_block: int, head_dim: int, programs: int, processors: int) -> bool:
    """Return whether one kernel computes dq, dk and dv: for two consumers of 64 keys and enough programs.

    Then programs end together: with 4 programs per multiprocessor one pass was 4 to 10 % faster than two.
    """
    return head_dim <= 128 and kv_block == 128 and programs > 3 * processors


def backward_pieces(group_size: int, programs: int, processors: int, fused: bool) -> int:
    """Return into how many pieces the q heads of a group are divided, each a program of its own per kv block.

    Fewer q heads at a time keep their q, do and sums of dq in L2. On an H100 with 32 q / 4 kv heads, 32k tokens, random
    10 %, pieces of 8, 4, 2 and 1 heads took 6.99, 5.36, 5.05 and 5.22 ms; with 28/4, 24k, 15 %, pieces of 7 and 1 heads
    4.48 and 3.55 ms. Where whole groups are enough programs for two passes, and pieces of 2 are none, two passes over
    whole groups were 9 % faster (28/4, 8k).

    Args:
        programs: of whole groups.
        fused: whether one kernel may compute all gradients.
    """
    if fused and 4 <= group_size <= 8 and group_size % 2 == 0 and programs * group_size >= 4 * processors:
        return group_size // 2
    if fused and 4 <= group_size <= 8 and 2 * programs >= 3 * processors:
        return group_size if programs >= 2 * processors else 1
    return group_size if programs < 2 * processors else 1


def backward_heads_together(seqlen_q: int, head_dim: int, kv_heads: int) -> int:
    """Return how many kv heads alternate in one pass, longest column first.

    With more heads, programs end together; with fewer, queries, gradients and sums of dq of these heads stay in L2.
    Measured best: 1 of 8 for 32k queries, 4 for 8k.
    """
    return max(1, min(kv_heads, (32 << 20) // (seqlen_q * head_dim * 8)))


def backward_ending(kv_blocks: int, heads: int, processors: int) -> int:
    """Return how many last kv blocks of each head come last of all: two per multiprocessor, none of short heads."""
    return min(kv_blocks // 8, -(-2 * processors // heads)) if kv_blocks >= 128 else 0


def backward_dq_stages(head_dim: int) -> tuple[int, int]:
    """Return tiles of k and of v in flight in the dq kernel, next to 128 queries and their gradients."""
    return (2, 1) if head_dim == 256 else (3, 2)


def selected_consumers(group_size: int, kv_block: int) -> int:
    """Return consumers per program of selected attention by query, 64 rows each; 0 for groups that go by key.

    Three read less and were 12 % faster than two. With larger blocks they spill, and with groups of 4 they would unite
    48 positions, more than a union has bits for.
    """
    return (3 if kv_block <= 64 and group_size > 4 else 2) if group_size in (4, 8, 16, 32, 64) else 0
