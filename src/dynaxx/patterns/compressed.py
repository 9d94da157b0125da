# SPDX-License-Identifier: Apache-2.0
"""The pattern of visible compressed tokens in the first branch of Native Sparse Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor
from typing_extensions import override

from dynaxx.arguments import typed
from dynaxx.layout import BlockGrid
from dynaxx.patterns.base import Pattern
from dynaxx.patterns.kinds import Blocks, Kinds, packed
from dynaxx.patterns.runs import Runs, Visited
from dynaxx.settings import Range, check_settings

MOST = 1 << 31  # tokens
Tokens = Annotated[int, Range(1, MOST - 1)]


@typed
@dataclass(frozen=True)
class Compressed(Pattern):
    """Compressed keys, each of which stands for `block` tokens; a query sees those that end at or before it.

    Build its layouts with `causal=False`: the rule is causal in tokens, and its keys are not tokens.

    Args:
        block: tokens that one key stands for (arXiv 2502.11089, eq. 7).
        stride: tokens between the starts of neighbouring keys.
        first: the token at query 0. It is tokens - seqlen_q if the queries are the last tokens.
    """

    block: Tokens
    stride: Tokens
    first: Annotated[int, Range(1 - MOST, MOST - 1)] = 0

    def __post_init__(self) -> None:
        """Check the sizes and the position."""
        check_settings(self, Compressed)

    @override
    def visible(self, grid: BlockGrid, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos * self.stride + self.block - 1 <= q_pos - grid.offset + self.first

    @override
    def visited(self, grid: BlockGrid) -> Visited:
        first = np.arange(grid.q_blocks) * grid.block_size[0] + self.first
        keys = lambda token: (token + 1 - self.block) // self.stride + 1  # keys that end at or before `token`
        end = lambda count: np.minimum(np.maximum(count, 0), grid.seqlen_k)
        zero = np.zeros_like(first)
        touched = Runs.one(zero, -(-end(keys(first + grid.block_size[0] - 1)) // grid.block_size[1]))
        return Visited(touched, Runs.one(zero, end(keys(first)) // grid.block_size[1]).within(touched))

    @override
    def kinds(self, blocks: Blocks) -> Kinds:
        q_block, kv_block = blocks.grid.block_size
        end = blocks.cols * kv_block * self.stride + self.block - 1  # the last token of the block's first key
        lead = blocks.rows * q_block + self.first - end
        found, kind = np.unique(np.minimum(np.maximum(lead, -q_block), kv_block * self.stride), return_inverse=True)
        shown = found[:, None, None] + np.arange(q_block)[:, None] >= np.arange(kv_block) * self.stride
        return Kinds(kind, packed(shown))
