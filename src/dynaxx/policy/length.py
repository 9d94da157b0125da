# SPDX-License-Identifier: Apache-2.0
"""Choose dense or sparse by length, with hysteresis."""

from __future__ import annotations

from dynaxx.arguments import typed


def is_long(seqlen_k: int, dense_below: int, sparse_from: int | None = None, *, before: bool = False) -> bool:
    """Return whether a sequence of `seqlen_k` keys runs sparse. See `Policy`.

    Args:
        seqlen_k: number of keys of the sequence.
        dense_below: number of keys below which a sequence runs dense.
        sparse_from: number of keys from which a sequence runs sparse; None means `dense_below`.
        before: the answer for the previous sequence, which holds between the borders. Engines whose sequences only grow
            leave it False.
    """
    if seqlen_k >= (dense_below if sparse_from is None else sparse_from):
        return True
    return before and seqlen_k >= dense_below


@typed
class LengthSwitch:
    """The state of `is_long`: it stores the last answer.

    Attributes:
        last: the last answer, False at first.
    """

    __slots__ = ("dense_below", "last", "sparse_from")

    def __init__(self, dense_below: int, sparse_from: int | None = None) -> None:
        self.dense_below = dense_below
        self.sparse_from = dense_below if sparse_from is None else sparse_from
        self.last = False

    def sparse(self, seqlen_k: int) -> bool:
        """Return whether a sequence of `seqlen_k` keys runs sparse, and store the answer."""
        self.last = is_long(seqlen_k, self.dense_below, self.sparse_from, before=self.last)
        return self.last

    def reset(self) -> None:
        """Forget the last answer."""
        self.last = False
