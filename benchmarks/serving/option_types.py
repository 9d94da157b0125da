# SPDX-License-Identifier: Apache-2.0
"""Types of command-line options that hold several values, such as "1000,8192"."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def several(kind: Callable[[str], T], *, empty: bool = False) -> Callable[[str], list[T]]:
    """Return the type of an option with values of one type between commas; `empty` allows none."""

    def values(text: str) -> list[T]:
        return [] if empty and not text else [kind(each) for each in text.split(",")]

    return values


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return the type of a value that is one of some names."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return name


def count(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def share(text: str) -> float:
    """Read a share above 0, at most 1.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share above 0 and at most 1, got {text!r}")
    return value


def sequences(text: str) -> tuple[int, int]:
    """Read a number of sequences and the tokens of each, such as "16x32768".

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    number, mark, tokens = text.partition("x")
    if not mark:
        raise argparse.ArgumentTypeError(f"must be SEQUENCESxTOKENS, such as 16x32768, got {text!r}")
    return count(number), count(tokens)


def pages(text: str) -> str:
    """Read the size of pages, and of the parts of one that a rule chooses: "64" or "64/16".

    Raises:
        argparse.ArgumentTypeError: the text is something else, or a page is no whole number of parts.
    """
    page, mark, part = text.partition("/")
    if count(page) % (count(part) if mark else 1):
        raise argparse.ArgumentTypeError(f"a page must be a whole number of parts, got {text!r}")
    return text
