# SPDX-License-Identifier: Apache-2.0
"""Workloads of the CPU suite."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynaxx.layout import BlockLayout
from dynaxx.patterns import Full, SlidingWindow

HEADS = 8

# seqlen, head_dim, pass, memory of q, k, v: of (batch, heads, seqlen, head_dim) as a kv cache has it, or of (batch,
# seqlen, heads, head_dim) as a projection leaves it, where the rows of a head lie apart.
SHAPES = (
    (4096, 64, "forward", "heads first"),
    (4096, 64, "backward", "heads first"),
    (4096, 128, "forward", "heads first"),
    (4096, 128, "backward", "heads first"),
    (8192, 64, "forward", "heads first"),
    (4096, 64, "forward", "tokens first"),
    (4096, 128, "forward", "tokens first"),
)
QUICK_SHAPES = SHAPES[:2]


@dataclass(frozen=True)
class Workload:
    """One causal shape; `window`, or `density` of random blocks, or neither for full density."""

    name: str
    seqlen: int
    head_dim: int = 64
    window: int | None = None
    density: float | None = None
    block_size: int = 64

    def layout(self, seed: int) -> BlockLayout:
        """Return the layout of a seed."""
        if self.window is not None:
            return SlidingWindow(self.window).layout(self.seqlen, block_size=self.block_size)
        if self.density is not None:
            return random_causal_layout(self.seqlen, self.density, self.block_size, seed)
        return Full().layout(self.seqlen, block_size=self.block_size)


def workloads(seqlen: int, head_dim: int) -> list[Workload]:
    """Return windows, random blocks, and full density at one shape."""
    windows = [Workload(f"window {w}", seqlen, head_dim, window=w) for w in (256, 512, 1024)]
    blocks = [
        Workload(f"random 10 %, blocks {block}", seqlen, head_dim, density=0.1, block_size=block)
        for block in (32, 64, 128)
    ]
    return [*windows, *blocks, Workload("full density", seqlen, head_dim)]


def random_causal_layout(seqlen: int, density: float, block_size: int, seed: int) -> BlockLayout:
    """Draw per head the diagonal and random blocks before it: `density` of each row's visible blocks, at least one."""
    blocks = -(-seqlen // block_size)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(1, HEADS, blocks, blocks, generator=generator, dtype=torch.float32, device="cpu")
    column, row = torch.arange(blocks, device="cpu"), torch.arange(blocks, device="cpu")[:, None]
    order = order.masked_fill(column > row, -1.0).masked_fill(column == row, 2.0)
    kept = ((row + 1) * density).round().clamp(min=1)
    rank = order.argsort(-1, descending=True).argsort(-1)
    return BlockLayout.from_block_indices(torch.where(rank < kept, column, -1), seqlen, block_size=block_size)
