# SPDX-License-Identifier: Apache-2.0
"""Dense or sparse by length, with hysteresis."""

from __future__ import annotations

from dynaxx.arguments import typed


def is_long(seqlen_k: int, dense_below: int, sparse_from: int | None = None, *, before: bool = False) -> bool:
    """Return whether a sequence of so many keys runs sparse; see `Policy`.

    Args:
        seqlen_k: keys of the sequence.
        dense_below: keys below which a sequence runs dense.
        sparse_from: keys from which a sequence runs sparse; `dense_below` where None.
        before: the answer for the sequence before, which holds between the borders. An engine whose sequences only
            grow leaves it False.
    """
    if seqlen_k >= (dense_below if sparse_from is None else sparse_from):
        return True
    return before and seqlen_k >= dense_below


@typed
class LengthSwitch:
    """The state of `is_long`: remembers the last answer.

    Attributes:
        last: the last answer, False at first.
    """

    __slots__ = ("dense_below", "last", "sparse_from")

    def __init__(self, dense_below: int, sparse_from: int | None = None) -> None:
        self.dense_below = dense_below
        self.sparse_from = dense_below if sparse_from is None else sparse_from
        self.last = False

    def sparse(self, seqlen_k: int) -> bool:
        """Return whether a sequence of so many keys runs sparse, and remember it."""
        self.last = is_long(seqlen_k, self.dense_below, self.sparse_from, before=self.last)
        return self.last

    def reset(self) -> None:
        """Forget the last answer."""
        self.last = False
