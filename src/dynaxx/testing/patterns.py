# SPDX-License-Identifier: Apache-2.0
"""`check_pattern`: compare the layouts of a pattern with its definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid, as_block_size
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.runs import checked_visited

LENGTHS = ((1, 1), (63, 63), (65, 65), (300, 300), (40, 300), (300, 40))
BLOCKS = (16, 64, (16, 64), (64, 16))


@typed
def check_pattern(
    pattern: Pattern,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    block_sizes: Sequence[int | tuple[int, int]] = BLOCKS,
) -> None:
    """Check that layouts of a pattern show exactly the pairs that `visible` defines, for a pattern of your own.

    `visited` says where a layout looks at all, so a block that it forgets would be missing without any error.

    Args:
        pattern: the pattern.
        lengths: (seqlen_q, seqlen_k) of the layouts.
        block_sizes: tokens per block of the layouts. Each is checked with and without causality.

    Raises:
        ValueError: a layout shows another pair than the definition, or is invalid; the message names the pair, its
            block and what to mend.
        TypeError: `visible` or `visited` returns a wrong type.
    """
    for (seqlen_q, seqlen_k), block_size, causal in product(lengths, block_sizes, (True, False)):
        grid = BlockGrid(seqlen_q, seqlen_k, as_block_size(block_size), causal)
        visited = checked_visited(pattern, grid.q_blocks, pattern.visited(grid))
        touched, filled = (set(zip(*runs.blocks(grid.q_blocks), strict=True)) for runs in visited)
        if not filled <= touched:
            row, col = min(filled - touched)
            raise ValueError(
                f"`visited` of {pattern!r} fills block {(int(row), int(col))} without touching it, on {grid}"
            )
        layout = pattern.layout(seqlen_q, seqlen_k, causal=causal, block_size=block_size).validate()
        wanted = definition(pattern, grid)
        wrong = (layout.to_dense()[0, 0] != wanted).nonzero()
        if len(wrong):
            i, j = wrong[0].tolist()
            block, shown = (i // layout.block_size[0], j // layout.block_size[1]), bool(wanted[i, j])
            fix = "must be among the touched blocks" if shown else "must not be among the filled blocks"
            raise ValueError(
                f"{pattern!r} {'shows' if shown else 'hides'} query {i} and key {j}, but its layout does not, for "
                f"{seqlen_q} x {seqlen_k} tokens, causal={causal}: block {block} of "
                f"{layout.block_size[0]} x {layout.block_size[1]} tokens {fix} of `visited`"
            )


def definition(pattern: Pattern, grid: BlockGrid) -> Tensor:
    """Return the pairs that a pattern shows, (seqlen_q, seqlen_k) bool on the CPU."""
    q_pos, k_pos = (
        torch.arange(grid.seqlen_q, device="cpu")[:, None] + grid.offset,
        torch.arange(grid.seqlen_k, device="cpu")[None],
    )
    seen = pattern.visible(grid, q_pos, k_pos).expand(grid.seqlen_q, grid.seqlen_k)
    return seen & (k_pos <= q_pos) if grid.causal else seen
