# SPDX-License-Identifier: Apache-2.0
"""Pieces of a group of q heads in the backward over kv blocks: as many as finish first in a model of the schedule.

A program computes one kv block for one piece of a group. More pieces are more and shorter programs, so that the
multiprocessors finish together, and their q, do and sums of dq fit in L2; but each program has a start, and dk and dv
of all pieces are summed afterwards. Programs start in the order of `backward_columns.column_of` wherever a place is
free. Costs are in tiles of kv_block x kv_block pairs of one head, fitted to 410 timings on an H200 (groups of 1 to 16
heads of 64, 96 and 128 over 1.5k to 32k tokens): the choice takes 1.3 % (blocks of 128) and 0.8 % (blocks of 64) more
time than the best number of pieces in the mean, and 18 % and 10 % at worst.
"""

import heapq
import math
from functools import lru_cache, partial
from typing import NamedTuple

from dynaxx.kernels.attention.hopper.config import backward_heads_together

L2 = 48 << 20  # bytes
WAVES = 16  # with more programs per place, uneven ends hardly count


class Columns(NamedTuple):
    """The kv blocks of a problem, as the programs of the backward over them see them."""

    kv_blocks: int
    batch: int
    kv_heads: int
    group_size: int
    seqlen_q: int
    head_dim: int
    share: int  # visited blocks over those under a causal mask is at most 2 ** -share; -1: without a causal mask
    reach: int | None  # largest distance of visited blocks from the diagonal, if it is known to be small
    places: int  # programs that run at the same time
    one_pass: bool  # dq, dk and dv in one kernel

    def lengths(self) -> list[float]:
        """Return the tiles of one head by column, in the order of columns."""
        density = 2.0**-self.share
        below = range(self.kv_blocks - 1, -1, -1)
        if self.share < 0:
            return [float(self.kv_blocks)] * self.kv_blocks
        return [1 + (density * rows if self.reach is None else min(rows, self.reach)) for rows in below]


@lru_cache(4096)
def backward_pieces(columns: Columns) -> int:
    """Return the number of pieces into which the q heads of a group are divided; all but the last are equal."""
    asked = range(1, columns.group_size + 1)
    return min(sorted({none_empty(columns.group_size, pieces) for pieces in asked}), key=partial(_cost, columns))


def none_empty(group_size: int, pieces: int) -> int:
    """Return the number of pieces so that each has a q head; all but the last have equal size."""
    each = -(-group_size // pieces)
    return -(-group_size // each)


def _cost(columns: Columns, pieces: int) -> float:
    start, summed, end = (2.0, 0.6, 0.2) if columns.one_pass else (4.0, 2.0, 0.0)
    group_size, heads, lengths = columns.group_size, columns.batch * columns.kv_heads, columns.lengths()
    each = -(-group_size // pieces)
    sizes = [min(each, group_size - i * each) for i in range(pieces)]
    programs = columns.kv_blocks * heads * pieces
    if programs > WAVES * columns.places:
        span = (start * programs + sum(lengths) * heads * group_size) / columns.places
    else:
        span = _makespan(columns, sizes, lengths, start)
    span += end * (start + max(lengths) * each)
    if columns.share > 0 and columns.reach is None:
        span *= 1 + 0.1 * max(0.0, math.log2(each * columns.seqlen_q * columns.head_dim * 8 / L2))
    return span + (summed * programs / columns.places if pieces > 1 else 0)


def _makespan(columns: Columns, sizes: list[int], lengths: list[float], start: float) -> float:
    pieces = len(sizes)
    heads = columns.batch * columns.kv_heads * pieces
    together = backward_heads_together(columns.seqlen_q, columns.head_dim, columns.kv_heads * pieces)
    free = [0.0] * columns.places
    for first in range(0, heads, together):
        for length in lengths:
            for head in range(first, min(first + together, heads)):
                heapq.heapreplace(free, free[0] + start + length * sizes[head % pieces])
    return max(free)
