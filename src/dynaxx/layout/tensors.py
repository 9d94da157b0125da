"""What a public function asks of its arguments before it looks at them."""

from __future__ import annotations

from torch import Tensor


def check_tensors(rank: int | None = None, **tensors: object) -> None:
    """Check that arguments are tensors, by name, and of a rank where one is given.

    Raises:
        TypeError: something else.
        ValueError: another rank.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
        if rank is not None and x.ndim != rank:
            raise ValueError(f"`{name}` must have {rank} dimensions, got shape {tuple(x.shape)}")
