# SPDX-License-Identifier: Apache-2.0
"""Rules in numbers: what the compiled core reads to build the layouts that `build.py` defines in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

FAR = 1 << 62  # beyond every position and distance


class Op(IntEnum):
    """As in core/source/rules.h, where each op's numbers are said; rules that others combine come before them."""

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
    """lo <= query - key <= hi, None where unlimited."""
    return [Op.BAND, -FAR if lo is None else max(lo, -FAR), FAR if hi is None else min(hi, FAR)]


def positions(op: Op, runs: Iterable[tuple[int, int]]) -> list[int]:
    """Keys or queries that stand from each first to before each end."""
    ends = [position for run in runs for position in run]
    if max(ends, default=0) > FAR:
        ends = [min(position, FAR) for position in ends]
    return [op, len(ends) // 2, *ends]
