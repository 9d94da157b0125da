"""A cache of layouts, bounded by their bytes: a long prompt's layout takes as much as ten thousand short ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, ParamSpec

from torch import Tensor

from dynaxx.layout.block_layout import BlockLayout

MOST_BYTES = 256 * 1024 * 1024

P = ParamSpec("P")


class LayoutCache(Generic[P]):
    """A function that makes layouts, and the layouts that it made last.

    Without a lock, so that a forked child never waits for a thread that it does not have: at worst two threads make
    the same layout.

    Args:
        make: returns the layout for some hashable arguments.
        most_bytes: of all layouts that are kept, with everything that was computed from them. One that is larger by
            itself is not kept.
    """

    def __init__(self, make: Callable[P, BlockLayout], most_bytes: int = MOST_BYTES) -> None:
        self._make = make
        self.most_bytes = most_bytes
        self._kept: dict[Hashable, BlockLayout] = {}  # the least recently used first
        functools.update_wrapper(self, make)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> BlockLayout:
        key = (args, tuple(sorted(kwargs.items())))
        layout = self._kept.pop(key, None)
        if layout is not None:
            self._kept[key] = layout
            return layout
        layout = self._make(*args, **kwargs)
        self._kept[key] = layout
        self._evict()
        return layout

    @property
    def bytes(self) -> int:
        """Bytes of all layouts that are kept; a tensor that several share counts once."""
        return sum(_storages(list(self._kept.values())).values())

    def clear(self) -> None:
        """Forget all layouts."""
        self._kept.clear()

    def _evict(self) -> None:
        """Forget the least recently used layouts until the rest is within the bound.

        Everything is measured again, since a layout grows after it was made: transposes and orders are added at use.
        """
        seen: dict[int, int] = {}
        total = 0
        for key, layout in reversed(list(self._kept.items())):
            for storage, size in _storages([layout]).items():
                total += 0 if storage in seen else size
                seen[storage] = size
            if total > self.most_bytes:
                self._kept.pop(key, None)


def _storages(values: list[BlockLayout]) -> dict[int, int]:
    """Return the bytes of every storage that layouts hold, by address."""
    return {
        storage.data_ptr(): storage.nbytes()
        for layout in values
        for storage in (tensor.untyped_storage() for tensor in _tensors(layout))
    }


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and dataclasses.is_dataclass(value):
        for each in list(vars(value).values()) if hasattr(value, "__dict__") else ():
            yield from _tensors(each, depth - 1)
