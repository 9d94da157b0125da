# SPDX-License-Identifier: Apache-2.0
"""`LayoutCache`: memoizes functions that build layouts, bounded by the bytes that the cached layouts hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dynaxx.derivatives import untransformed
from dynaxx.layout.host import never_traced

MAX_BYTES = 256 * 1024 * 1024
MAX_VALUES = 128
GROWTH = 8  # estimate: values derived from a layout later take at most this multiple of its own bytes

P = ParamSpec("P")
T = TypeVar("T")


class Kept(NamedTuple, Generic[T]):
    """A cached value, with what is needed to detect writes to its tensors."""

    value: T
    tensors: tuple[Tensor, ...]  # tensors of the new value; not inference tensors, whose writes torch does not count
    versions: list[int]  # torch's write counter of each tensor when the value was cached
    size: int  # total bytes of `tensors`


class LayoutCache(Generic[P, T]):
    """Memoize a function that builds layouts or other values that hold tensors; evict the least recently used ones.

    All callers that pass the same arguments get the same tensors. If a caller has written to them, the next call builds
    the value again, so no caller sees the numbers of another. The cache has no lock, so a forked child never waits for
    a thread that does not exist in it; in the worst case two threads build the same value.

    Args:
        make: function to memoize; its arguments must be hashable.
        most_bytes: upper bound for the bytes of all cached values, including values derived from them. A value that
            alone exceeds the bound is not cached.
        most: upper bound for the number of cached values.
    """

    def __init__(self, make: Callable[P, T], most_bytes: int = MAX_BYTES, most: int = MAX_VALUES) -> None:
        self._make = make
        self.most_bytes, self.most = most_bytes, most
        self._kept: dict[Hashable, Kept[T]] = {}  # least recently used first
        self._size = 0  # approximate bytes of the values' own tensors: concurrent threads may lose an update
        functools.update_wrapper(self, make)

    @never_traced  # compilers fail on versions of tensors, and on the numpy below
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the cached value, or compute it."""
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        kept = self._kept.pop(key, None)
        if kept is not None and [x._version for x in kept.tensors] == kept.versions:
            self._kept[key] = kept
            return kept.value
        value = self._made(*args, **kwargs)
        tensors = tuple([x for x in _own_tensors(value) if not x.is_inference()])
        size = sum([x.nbytes for x in tensors])
        self._kept[key] = Kept(value, tensors, [x._version for x in tensors], size)
        self._size += size
        self._evict()
        return value

    def _made(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return a new value, outside of modes whose tensors later callers could not use.

        Such modes are FakeTensorMode, transforms of `torch.func`, and inference mode, whose tensors cannot be saved
        for a backward pass.
        """
        with untransformed(), torch.inference_mode(False):
            if not torch._C._len_torch_dispatch_stack():
                return self._make(*args, **kwargs)
            with _disable_current_modes():
                return self._make(*args, **kwargs)

    @property
    def bytes(self) -> int:
        """Bytes of all cached values; a storage that several values share counts once."""
        return sum(_storages(_tensors([kept.value for kept in list(self._kept.values())])).values())

    def clear(self) -> None:
        """Drop all cached values."""
        self._kept.clear()

    def _evict(self) -> None:
        """Drop the least recently used values until the cache is within its bounds."""
        while len(self._kept) > self.most:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread evicted this value first
                self._size -= self._kept.pop(next(iter(self._kept))).size
        if GROWTH * self._size <= self.most_bytes:
            return
        # Layouts grow after they are cached, because transposes and row orders are derived at first use. Measure again.
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
    """Return the tensors that a value was built from, without tensors derived from them later."""
    tensors = getattr(value, "tensors", None)
    return tensors if isinstance(tensors, tuple) else _tensors(value)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each distinct storage behind `tensors`, keyed by address."""
    return {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


def _tensors(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors inside a value: in containers, dataclasses and objects with a `tensors` attribute."""
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
