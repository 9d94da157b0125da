"""`LengthSwitch`: dense or sparse by length."""

from __future__ import annotations

from dynaxx.arguments import typed


@typed
class LengthSwitch:
    """Dense or sparse by length, with hysteresis; see `Policy`.

    Attributes:
        last: the last answer, False at first.
    """

    __slots__ = ("dense_below", "last", "sparse_from")

    def __init__(self, dense_below: int, sparse_from: int | None = None) -> None:
        self.dense_below = dense_below
        self.sparse_from = dense_below if sparse_from is None else sparse_from
        self.last = False

    def sparse(self, seqlen_k: int) -> bool:
        """Whether a sequence of so many keys runs sparse."""
        if seqlen_k >= self.sparse_from:
            self.last = True
        elif seqlen_k < self.dense_below:
            self.last = False
        return self.last

    def reset(self) -> None:
        """Forget the last answer."""
        self.last = False
