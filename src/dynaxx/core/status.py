# SPDX-License-Identifier: Apache-2.0
"""Status codes of the C++ core, and the exceptions they stand for. The codes are those of `source/status.h`."""

from __future__ import annotations

OK, NO_MEMORY, BAD_INPUT, FAILED = range(4)


def raise_for_status(code: int) -> None:
    """Raise what a status code of the core stands for; return for OK.

    Raises:
        MemoryError: the core could not allocate its working memory.
        ValueError: arguments that contradict one another, or lie outside of what the core computes with.
        RuntimeError: any other failure.
    """
    if code == OK:
        return
    if code == NO_MEMORY:
        raise MemoryError("the CPU core could not allocate its working memory")
    if code == BAD_INPUT:
        raise ValueError(
            "the CPU core refused its arguments: sizes that contradict one another, or a layout whose tensors were "
            "changed while it was read"
        )
    raise RuntimeError(f"the CPU core failed with status {code}")
