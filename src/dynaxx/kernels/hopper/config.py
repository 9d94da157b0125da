"""Tile sizes of the Hopper kernels, pure functions of shapes; queries go in rows of 64, which is wgmma's M."""

from __future__ import annotations

from dynaxx.kernels.triton.config import Tiles


def forward_step(head_dim: int, kv_block: int, consumers: int) -> int:
    """Keys of one step of the forward: one block, or two where its two consumers fill the processor anyway."""
    return 128 if consumers == 2 else kv_block


def forward_stages(head_dim: int) -> int:
    """Steps of keys and values in flight in the forward: as many as fit beside two rows of queries."""
    return 2


def backward_stages(head_dim: int) -> int:
    """Tiles of q and do in flight in the backward over kv blocks."""
    return 2


def backward_in_one_pass(kv_block: int, programs: int, processors: int) -> bool:
    """Whether one kernel gives dq, dk and dv: for two consumers of 64 keys, and where many programs end together.

    With 4 programs for each multiprocessor it was 7 to 10 % slower than two passes, with 8 it was 5 % faster.
    """
    return kv_block == 128 and programs >= 6 * processors


def backward_dq_tiles(head_dim: int, q_block: int, kv_block: int) -> Tiles:
    """Of the kernel for dq."""
    return Tiles(64, min(kv_block, 64), 4, 2)


def selected_consumers(group_size: int, kv_block: int) -> int:
    """Consumers of a program of selected attention by query, 64 rows each; 0 for groups that go another way.

    Three read less and were 12 % faster than two; with larger blocks they spill, and with groups of 4 they would unite
    48 positions, more than a union has bits for.
    """
    return (3 if kv_block <= 64 and group_size > 4 else 2) if group_size in (4, 8, 16, 32, 64) else 0
