# SPDX-License-Identifier: Apache-2.0
"""A cache of layouts, bounded by their bytes: a long prompt's layout takes as much as ten thousand short ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

MOST_BYTES = 256 * 1024 * 1024
MOST_VALUES = 128
GROWTH = 8  # what is computed from a layout later takes at most so many times its own bytes, estimated

P = ParamSpec("P")
T = TypeVar("T")


class Kept(NamedTuple, Generic[T]):
    """A value of the cache."""

    value: T
    tensors: tuple[Tensor, ...]  # of the value when it was made; inference tensors, which are not counted, aside
    versions: list[int]  # how often each had been written to
    size: int  # bytes of these tensors


class LayoutCache(Generic[P, T]):
    """A function that makes layouts (or other values that hold tensors), and the values that it made last.

    Every caller that asks for the same value gets the same tensors. One that somebody has written to since is made
    anew, so that no caller gets the numbers of another. There is no lock, so a forked child never waits for a thread
    that it does not have: at worst two threads make the same value.

    Args:
        make: returns the value for some hashable arguments.
        most_bytes: of all values that are kept, with everything that was computed from them. One that is larger by
            itself is not kept.
        most: values to keep.
    """

    def __init__(self, make: Callable[P, T], most_bytes: int = MOST_BYTES, most: int = MOST_VALUES) -> None:
        self._make = make
        self.most_bytes, self.most = most_bytes, most
        self._kept: dict[Hashable, Kept[T]] = {}  # the least recently used first
        self._size = 0  # of their own tensors, about: threads may lose an update
        functools.update_wrapper(self, make)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        kept = self._kept.pop(key, None)
        if kept is not None and [x._version for x in kept.tensors] == kept.versions:
            self._kept[key] = kept
            return kept.value
        value = self._make(*args, **kwargs)
        tensors = tuple([x for x in _own_tensors(value) if not x.is_inference()])
        size = sum([x.nbytes for x in tensors])
        self._kept[key] = Kept(value, tensors, [x._version for x in tensors], size)
        self._size += size
        self._evict()
        return value

    @property
    def bytes(self) -> int:
        """Bytes of all values that are kept; a tensor that several share counts once."""
        return sum(_storages(_tensors([kept.value for kept in list(self._kept.values())])).values())

    def clear(self) -> None:
        """Drop all values."""
        self._kept.clear()

    def _evict(self) -> None:
        """Drop the least recently used values until the rest is within the bounds."""
        while len(self._kept) > self.most:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread was faster
                self._size -= self._kept.pop(next(iter(self._kept))).size
        if GROWTH * self._size <= self.most_bytes:
            return
        # A layout grows after it was made: transposes and orders are added at use. So everything is measured again.
        seen: dict[int, int] = {}
        total = 0
        for key, kept in reversed(list(self._kept.items())):
            for storage, size in _storages(_tensors(kept.value)).items():
                total += 0 if storage in seen else size
                seen[storage] = size
            if total > self.most_bytes:
                self._kept.pop(key, None)
        self._size = sum(kept.size for kept in list(self._kept.values()))


def _own_tensors(value: Any) -> Iterable[Tensor]:
    """Return the tensors that a value was made of."""
    tensors = getattr(value, "tensors", None)
    return tensors if isinstance(tensors, tuple) else _tensors(value)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of every storage that some tensors have, by address."""
    return {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


def _tensors(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors that a value holds, through containers, dataclasses and whatever has `tensors`."""
    if isinstance(value, Tensor):
        yield value
        return
    within: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        within = value
    elif isinstance(value, dict):
        within = list(value.values())
    elif dataclasses.is_dataclass(value):
        within = list(vars(value).values()) if hasattr(value, "__dict__") else ()
    elif isinstance(getattr(value, "tensors", None), list | tuple):
        within = value.tensors
    for each in within if depth else ():
        yield from _tensors(each, depth - 1)
