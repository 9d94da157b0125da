"""Tile sizes of the Hopper backward, a pure function of shapes; the forward's tiles are the blocks themselves."""

from __future__ import annotations

from dynaxx.kernels.triton.config import Tiles


def backward_dq_tiles(head_dim: int, q_block: int, kv_block: int) -> Tiles:
    """Of the kernel for dq."""
    return Tiles(64, min(kv_block, 64), 4, 2)


def backward_dkv_tiles(head_dim: int, q_block: int, kv_block: int) -> Tiles:
    """Of the kernel for dk and dv."""
    return Tiles(64, min(kv_block, 64), 4, 2)
