# SPDX-License-Identifier: Apache-2.0
"""The order in which persistent programs of the forward take rows of blocks: as the model says that they end first.

The programs take turns over a sequence of rows (`primitives.hopper.parts.unit_of_turn`). In it, the rows of some heads
alternate, longest first, then those of the next heads. With few heads their k and v stay in L2. But if the rows of
these heads are about as many as one or two turns, a program gets the longest rows of all heads: at 132 programs, four
heads of 64 rows under a causal mask take 1.5 times as long as one head at a time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynaxx.layout import BlockLayout

L2 = 48 << 20  # bytes
MAX_TOGETHER = 128
START = 1.0  # blocks, the time in which a row starts and ends


class Schedule(NamedTuple):
    """The sizes of a call that the model reads. A line is the rows of one head, or of two that one program computes."""

    lengths: bytes  # blocks per row of a line, float32, in the order of its rows
    lines: int  # of all batch entries
    lines_of_kv_head: int
    kv_bytes: int  # k and v of a kv head
    q_block: int
    programs: int
    beside: int  # programs that share a multiprocessor


def row_lengths(layout: BlockLayout) -> bytes:
    """Return the mean number of blocks of each row over batch entries and heads, in the order in which rows start.

    Without a host copy, as for a selection, all rows have the same number but the first ones, which see fewer.
    """
    host, q_blocks = layout.host, layout.q_blocks
    if host is None:
        mean = layout.kv_indices.numel() / max(1, layout.layout_batch * layout.layout_heads * q_blocks)
        return np.minimum(np.arange(q_blocks, 0, -1), mean).astype(np.float32).tobytes()
    counts = np.diff(host.kv_indptr.numpy()).reshape(-1, q_blocks).mean(0)
    in_turn = counts[::-1] if layout.kv_order is None else np.sort(counts)[::-1]
    return in_turn.astype(np.float32).tobytes()


@lru_cache(256)
def lines_together(schedule: Schedule) -> int:
    """Return how many lines alternate, a divisor of their number."""
    most = min(schedule.lines, MAX_TOGETHER)
    return min(
        (lines for lines in range(1, most + 1) if schedule.lines % lines == 0), key=lambda x: time_of(schedule, x)
    )


def time_of(schedule: Schedule, together: int) -> float:
    """Return the time of the last program in blocks, including what lines cost that do not stay in L2.

    Fitted to 25 problems on an H200 with 1 to 32 kv heads together: the choice takes 0.5 % more time than the best one
    in the mean, and 4 % at worst.
    """
    kv_heads = max(1.0, together / schedule.lines_of_kv_head)
    beyond = max(0.0, math.log2(kv_heads * schedule.kv_bytes / L2))
    return _span(schedule, together) * (1 + 0.01 * math.log2(kv_heads) + 0.06 * beyond * 128 / schedule.q_block)


def _span(schedule: Schedule, together: int) -> float:
    """Return the largest sum of the rows of the programs on one multiprocessor."""
    line = np.frombuffer(schedule.lengths, np.float32) + np.float32(START)
    rows = np.tile(np.repeat(line, together), schedule.lines // together)
    turns = np.zeros((-(-len(rows) // schedule.programs), schedule.programs), np.float32)
    turns.reshape(-1)[: len(rows)] = rows
    turns[1::2] = turns[1::2, ::-1]
    return float(turns.sum(0).reshape(schedule.beside, -1).sum(0).max())
