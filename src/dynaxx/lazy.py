# SPDX-License-Identifier: Apache-2.0
"""Make values at first use: attributes of objects (`lazy`) and names of modules (`load_at_first_use`, `renamed`)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """Compute an attribute at first use and keep it in the instance's `__dict__`.

    This is `functools.cached_property` without its lock. Python 3.11 has one lock per attribute for all instances of a
    class, so threads wait for each other, and a child that is forked while another thread holds the lock waits for
    ever. If two threads compute the attribute at once, the first result stays.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the name of the attribute."""
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the value, which is computed at first use; on a class, return the descriptor."""
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.compute(instance))


def load_at_first_use(package: str, sources: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the module that defines a name when the name is first used.

    Args:
        package: the package's `__name__`.
        sources: names by module, relative to the package.
    """
    source_of = {name: f"{package}.{module}" for module, names in sources.items() for name in names}

    def load(name: str) -> Any:
        if name not in source_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(source_of[name]), name)

    return load


def renamed(module: str, new_names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which finds its old names and warns with the new ones.

    Args:
        module: the module's `__name__`.
        new_names: new names by old ones.
    """

    def find(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"`{module}.{name}` is now `{new_names[name]}`", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), new_names[name])

    return find
