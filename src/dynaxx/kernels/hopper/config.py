"""Tile sizes of the Hopper kernel for dq, a pure function of shapes; the other kernels' tiles are rows of 64."""

from __future__ import annotations

from dynaxx.kernels.triton.config import Tiles


def backward_dq_tiles(head_dim: int, q_block: int, kv_block: int) -> Tiles:
    """Of the kernel for dq."""
    return Tiles(64, min(kv_block, 64), 4, 2)
