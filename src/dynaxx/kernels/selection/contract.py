# SPDX-License-Identifier: Apache-2.0
"""Scores and choices of blocks: what backends are asked, and the functions that they provide.

Shapes use the letters of `dynaxx.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dynaxx.layout import BlockGrid


@dataclass(frozen=True)
class SelectionProblem:
    """Scoring of blocks, and optionally the selection of a row's blocks."""

    device: torch.device
    q_blocks: int | None = None  # None: only scores are requested
    kv_blocks: int | None = None
    rule: str = ""
    by_amount: bool = True  # whether the rule is a number, a share or a threshold per row or head

    def __str__(self) -> str:
        """Return the problem in words, for error messages and `explain_selection`."""
        return f"selection on {self.device}: {self.rule} among {self.q_blocks} x {self.kv_blocks} blocks"


@dataclass(frozen=True)
class QueryScoresProblem:
    """Scores of one query per row of q blocks against every key, summed to blocks."""

    device: torch.device
    dtype: torch.dtype  # of k
    head_dim: int
    kv_block: int
    aligned: bool  # whether rows of k begin at multiples of 16 bytes

    def __str__(self) -> str:
        """Return the problem in words, for error messages."""
        return f"scores of blocks of {self.kv_block} keys on {self.device}: {self.dtype}, head_dim {self.head_dim}"


class QueryScoresKernels(Protocol):
    """Scores of blocks, (B, Hq, rows, kv blocks) fp32, by one query per row."""

    def query_scores(
        self,
        queries: Tensor,
        k: Tensor,
        first_row: int,
        grid: BlockGrid,
        places: Tensor | None = None,
        q_block: int | None = None,
    ) -> Tensor:
        """Return the log of the attention mass that one query per row gives to each block.

        A row sees the keys up to the last of its `q_block` queries, by default those of the grid's blocks. With
        `places`, (kv blocks,) int32, block i of the keys is block places[i] of k.
        """


class SelectionKernels(Protocol):
    """Scores of blocks, from which selectors choose. Scores are (B, Hq, rows, kv blocks) fp32."""

    def pool_blocks(self, x: Tensor, size: int, kind: str, scale: float = 1.0, dtype: Any = ...) -> Tensor:
        """Return the mean, minimum or maximum of each block of `size` tokens."""
