# SPDX-License-Identifier: Apache-2.0
"""Encode rules as numbers for the compiled core, which builds the layouts that `build.py` defines in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

FAR = 1 << 62  # beyond every position and distance


class Op(IntEnum):
    """Operation codes as in core/source/rules.h, which lists each op's operands. Operands precede their operator."""

    BAND = 0
    MULTIPLES = 1
    KEYS = 2
    QUERIES = 3
    DOCUMENTS = 4
    LOCAL_BLOCKS = 5
    RANDOM_BLOCKS = 6
    ANY = 7
    ALL = 8


def band(lo: int | None, hi: int | None) -> list[int]:
    """Encode the band lo <= query - key <= hi. None means unlimited."""
    return [Op.BAND, -FAR if lo is None else max(lo, -FAR), FAR if hi is None else min(hi, FAR)]


def positions(op: Op, runs: Iterable[tuple[int, int]]) -> list[int]:
    """Encode the keys or queries in the half-open ranges `runs`."""
    ends = [position for run in runs for position in run]
    if max(ends, default=0) > FAR:
        ends = [min(position, FAR) for position in ends]
    return [op, len(ends) // 2, *ends]
