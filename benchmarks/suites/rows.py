# SPDX-License-Identifier: Apache-2.0
"""Select rows of a benchmark by name, and report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Report = Callable[[str], None]  # receives a line of text


def rows_named(option: str, wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that start like one of `wanted`, in their own order.

    Raises:
        ValueError: one of `wanted` that none of them starts like.
    """
    for each in wanted:
        if not any(name.startswith(each) for name in names):
            raise ValueError(f"`{option}` must name some of {list(names)}, got {each!r}")
    return [name for name in names if name.startswith(tuple(wanted))]
