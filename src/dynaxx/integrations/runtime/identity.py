# SPDX-License-Identifier: Apache-2.0
"""`ByIdentity`: a weak map from objects to values that compares its keys by identity."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """A map from objects to values that references its keys weakly and compares them by identity.

    A `WeakKeyDictionary` needs keys with a hash and equality, which caches of other libraries may lack. Objects without
    weak references are not stored, so `get` returns None for them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: Any) -> Value | None:
        """Return the value of an object, or None."""
        found = self._kept.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def put(self, key: Any, value: Value) -> None:
        """Store a value for an object."""
        number = id(key)
        try:
            held = weakref.ref(key, lambda _: self._kept.pop(number, None))
        except TypeError:
            return
        self._kept[number] = held, value

    def setdefault(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return the value of an object, made and stored if there is none."""
        found = self.get(key)
        if found is None:
            self.put(key, found := make())
        return found

    def keys(self) -> list[Any]:
        """Return the objects that are alive."""
        alive = (held() for held, _ in list(self._kept.values()))
        return [key for key in alive if key is not None]

    def __len__(self) -> int:
        """Return the number of keys that still exist."""
        return len(self._kept)
