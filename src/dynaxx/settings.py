# SPDX-License-Identifier: Apache-2.0
"""Settings of rules: patterns, scorers and selectors. The annotation of a setting states its type and its range.

Everything else follows from the annotations: the constructor checks them, a policy file stores the settings under the
rule's `kind` (policy/specs.py), property tests draw them, and the tables of the guides list them.
"""

from __future__ import annotations

import random
import types
import typing
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, ClassVar, Literal, Self

import torch

from dynaxx.arguments import as_integer, described, fits, number

RULES: dict[str, type[Configured]] = {}  # by their kinds


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as metadata of its type: `Annotated[int, Range(1)]`."""

    least: float = float("-inf")
    most: float = float("inf")
    above: bool = False  # whether the number must be greater than `least`
    stored: float | None = None  # largest number in a policy file, if it is less than `most`
    tries: tuple[float, ...] = ()  # numbers that property tests draw; () for a few within the bounds

    def holds(self, value: Any) -> bool:
        """Return whether a number lies within the bounds."""
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        """Return the bounds in words."""
        if self.most < float("inf"):
            return f"from {self.least} to {self.most}"
        return f"{'>' if self.above else '>='} {self.least}"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Seed = Annotated[int, Range(-(2**63), 2**63 - 1, tries=(0, 1, 7))]
Share = Annotated[float, Range(0.0, 1.0)]
NotNegative = Annotated[float, Range(0.0)]
NUMBERS = (-1, 0, 1, 2, 3, 5, 8, 16, 33, 40, 100)  # drawn for integers without `tries`


class Configured:
    """Base of the rules whose settings are the fields of a frozen dataclass.

    `class Own(Pattern, kind="own")` names a rule. Its settings are checked when it is made, policy files may name it,
    and property tests draw it with `random`. A rule without a kind has no such settings.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "", **more: Any) -> None:
        """Register a class that has a kind.

        Raises:
            ValueError: another class has the kind.
        """
        super().__init_subclass__(**more)
        cls.kind = kind
        other = RULES.get(kind)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"`kind` must be unused, got {kind!r}, the kind of {other.__module__}.{other.__qualname__}"
            )
        if kind:
            RULES[kind] = cls

    def __post_init__(self) -> None:
        """Check the settings; see `check_settings`."""
        check_settings(self)

    @classmethod
    def random(cls, rng: random.Random, seqlen_k: int) -> Self:
        """Draw a rule for a property test with `seqlen_k` >= 1 keys. Override it if settings depend on each other."""
        rule: Any = cls
        return cls(**{name: drawn(hint, rng, seqlen_k) for name, hint in settings_of(rule).items()})


def check_settings(rule: Any, owner: Any = None) -> None:
    """Check fields of a frozen dataclass. Convert numbers of other types to `int` or `float`, and lists to tuples.

    Compilers cannot trace annotations, so code that `torch.compile` traces is not checked.

    Args:
        rule: the object.
        owner: the class whose annotations count; None for the one that has the rule's kind.

    Raises:
        TypeError, ValueError: a field does not have the type or the range of its annotation.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    kind: Any = type(rule)
    for name, hint in (settings_of(kind) if owner is None else hints_of(owner)).items():
        given = getattr(rule, name)
        value, error = _fitted(name, given, hint)
        if isinstance(error, TypeError):
            raise TypeError(f"`{name}` must be {in_words(hint)}, got {described(given)}")
        if error is not None:
            raise ValueError(f"`{name}` must be {error}, got {repr(given)[:80]}")
        if value is not given:
            object.__setattr__(rule, name, value)


def registered(*bases: type[Any]) -> list[Any]:
    """Return the registered subclasses of some classes, and the classes themselves if they are registered."""
    return [rule for rule in RULES.values() if issubclass(rule, bases)]


def import_folder(package: str, *bases: type[Any]) -> dict[str, Any]:
    """Import every module of a package. Return the registered subclasses of `bases` in it, by name."""
    for module in iter_modules(import_module(package).__path__, f"{package}."):
        import_module(module.name)
    return {rule.__name__: rule for rule in registered(*bases) if rule.__module__.startswith(f"{package}.")}


@lru_cache(maxsize=256)
def settings_of(rule: Any) -> dict[str, Any]:
    """Return the annotations of a rule's settings; none if neither the class nor a base of it has a kind."""
    owner = next((each for each in rule.__mro__ if vars(each).get("kind")), None)
    return {} if owner is None else hints_of(owner)


@lru_cache(maxsize=256)
def hints_of(owner: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return {field.name: hints[field.name] for field in fields(owner) if field.init}


def defaults_of(rule: Any) -> dict[str, Any]:
    """Return the default values of those settings that have one."""
    found = {}
    for field in fields(rule):
        if field.init and field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
        elif field.init and field.default is not MISSING:
            found[field.name] = field.default
    return found


def signature(rule: Any) -> str:
    """Return a rule's constructor call as text, such as "RandomBlocks(blocks, seed=0)"."""
    defaults = defaults_of(rule)
    names = (f"{name}={_called(defaults[name])}" if name in defaults else name for name in settings_of(rule))
    return f"{rule.__name__}({', '.join(names)})"


def _called(value: Any) -> str:
    return f"{type(value).__name__}()" if isinstance(value, Configured) else repr(value)


def in_words(hint: Any) -> str:
    """Return the types that an annotation takes, in words."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return in_words(of[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, of))
    if origin is tuple and of[-1] is Ellipsis:
        return f"a tuple of which each is {in_words(of[0])}"
    if origin is tuple:
        return f"({', '.join(map(in_words, of))})"
    names = {int: "an integer", float: "a number", bool: "a bool", type(None): "None"}
    return names[hint] if hint in names else f"a {getattr(hint, '__name__', hint)}"


def _fitted(name: str, value: Any, hint: Any) -> tuple[Any, Exception | None]:
    """Return a value as its annotation wants it, and an error with the contract that the value breaks.

    Raises:
        TypeError: a tensor for a number has a gradient, which would be lost.
    """
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value, error = _fitted(name, value, of[0])
        return value, error or (None if of[1].holds(value) else ValueError(of[1]))
    if origin in (typing.Union, types.UnionType):
        tried = [_fitted(name, value, each) for each in of]
        return min(tried, key=lambda result: (type(None), ValueError, TypeError).index(type(result[1])))
    if origin is Literal:
        known = any(type(value) is type(each) and value == each for each in of)
        return value, None if known else ValueError(" or ".join(map(repr, of)))
    if origin is tuple and isinstance(value, tuple | list):
        hints = of[:1] * len(value) if of[-1] is Ellipsis else of
        if len(hints) != len(value):
            return value, ValueError(f"of {len(hints)} values")
        fitted = [_fitted(name, *each) for each in zip(value, hints, strict=True)]
        return tuple(item for item, _ in fitted), next((error for _, error in fitted if error is not None), None)
    if hint is int:
        try:
            return as_integer(name, value), None
        except TypeError:
            return value, TypeError()
    if not fits(value, hint):
        return value, TypeError()
    return number(name, value) if hint is float and type(value) is not float else value, None


def drawn(hint: Any, rng: random.Random, seqlen_k: int) -> Any:
    """Draw a value that an annotation allows, for a problem with `seqlen_k` keys."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and of[0] is int:
        return rng.choice(of[1].tries or [number for number in NUMBERS if of[1].holds(number)])
    if origin is Annotated:
        bounds = of[1]
        return rng.choice(bounds.tries) if bounds.tries else rng.uniform(bounds.least, min(bounds.most, 2.0))
    if origin in (typing.Union, types.UnionType):  # a tuple of any length is one value per head, or a list of positions
        single = [each for each in of if not (typing.get_origin(each) is tuple and Ellipsis in typing.get_args(each))]
        return drawn(rng.choice(single), rng, seqlen_k)
    if origin is Literal:
        return rng.choice(of)
    if origin is tuple and Ellipsis not in of:
        return tuple(drawn(each, rng, seqlen_k) for each in of)
    if isinstance(hint, type) and issubclass(hint, Configured):
        return rng.choice(registered(hint)).random(rng, seqlen_k)
    simple = {int: lambda: rng.randint(-9, 9), bool: lambda: rng.random() < 0.5, type(None): lambda: None}
    if hint not in simple:
        raise TypeError(f"a value of type {hint} cannot be drawn; override `random`")
    return simple[hint]()
