# SPDX-License-Identifier: Apache-2.0
"""Status codes of the C++ core, equal to those in `source/status.h`, and the exceptions that they become."""

from __future__ import annotations

OK, NO_MEMORY, BAD_INPUT, FAILED = range(4)


def raise_for_status(code: int) -> None:
    """Raise the exception for a status code of the core; return for OK.

    Raises:
        MemoryError: the core could not allocate its working memory.
        ValueError: arguments contradict one another or exceed the limits of the core.
        RuntimeError: any other failure.
    """
    if code == OK:
        return
    if code == NO_MEMORY:
        raise MemoryError("the CPU core could not allocate its working memory")
    if code == BAD_INPUT:
        raise ValueError(
            "the CPU core refused its arguments: sizes contradict one another, or the tensors of a layout were changed "
            "while they were read"
        )
    raise RuntimeError(f"the CPU core failed with status {code}")
