# SPDX-License-Identifier: Apache-2.0
"""`ByIdentity`: what is kept beside an object for as long as the object lives, whatever its class says of equality."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """A map by the object itself, held weakly.

    A `WeakKeyDictionary` asks its keys for a hash and for equality, which caches of other libraries may not have.
    Objects that cannot be held weakly are not kept: `get` returns None for them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: Any) -> Value | None:
        """Return what is kept beside an object; None if nothing is."""
        found = self._kept.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def put(self, key: Any, value: Value) -> None:
        """Keep a value beside an object."""
        number = id(key)
        try:
            held = weakref.ref(key, lambda _: self._kept.pop(number, None))
        except TypeError:
            return
        self._kept[number] = held, value

    def keys(self) -> list[Any]:
        """Return the objects that are alive."""
        alive = (held() for held, _ in list(self._kept.values()))
        return [key for key in alive if key is not None]

    def __len__(self) -> int:
        return len(self._kept)
