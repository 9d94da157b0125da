# SPDX-License-Identifier: Apache-2.0
"""Attention rules as plain data: one small model per pattern, scorer and selector, derived from the rule's settings.

`to_spec(rule)` converts a `Pattern`, `Selector` or `Hybrid` to data, and `spec.build()` builds it again. The round trip
is exact. Validation builds the object once, so that a document that loads always runs.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Field, PlainValidator, SerializeAsAny, Strict, TypeAdapter, create_model, model_validator

from dynaxx.patterns import Pattern
from dynaxx.policy.document import MAX_LISTED, MOST, Document, Flag, Int
from dynaxx.selection import Hybrid, Scorer, Selector
from dynaxx.settings import Configured, Range, defaults_of, registered, settings_of

AttentionRule: TypeAlias = Pattern | Selector | Hybrid  # the rule of a head; None means dense

MAX_PARTS = 64  # limit on the parts of a union or an intersection
MAX_SEQUENCES = 1024  # limit on the lists in one list


class Spec(Document):
    """A rule as data: its kind, and its settings by their names.

    A setting that is a share or a number of blocks is stored as `share` or as `blocks`, because JSON does not
    distinguish 1 from 1.0.
    """

    rule: ClassVar[Any]

    @model_validator(mode="after")
    def _must_build(self) -> Spec:
        self.build()
        return self

    def build(self) -> Any:
        """Return the rule that this data describes."""
        settings = {}
        for name, hint in settings_of(self.rule).items():
            value = self._share_or_blocks() if _either(hint) else getattr(self, name)
            if isinstance(value, tuple):
                value = tuple(each.build() if isinstance(each, Spec) else each for each in value)
            settings[name] = value.build() if isinstance(value, Spec) else value
        return self.rule(**settings)

    def _share_or_blocks(self) -> Any:
        share, blocks = getattr(self, "share", None), getattr(self, "blocks", None)
        if (share is None) == (blocks is None):
            raise ValueError("give exactly one of `share` and `blocks`")
        return share if blocks is None else blocks

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to unpickle a spec, whose class is not in a module."""
        return _unpickled, (self.model_dump_json(),)


class DenseSpec(Spec):
    """Dense attention, stated explicitly."""

    kind: Literal["dense"] = "dense"

    def build(self) -> None:
        """Return None, which means dense."""
        return None


def to_spec(rule: AttentionRule | Scorer | Configured | None) -> Any:
    """Convert a pattern, selector, hybrid or scorer to data. None means dense.

    Raises:
        ValueError: a policy file cannot express the object.
    """
    if rule is None:
        return DenseSpec()
    made: Any = type(rule)
    if made not in registered(Configured):
        raise ValueError(f"a policy cannot express {rule!r}; use a pattern, selector or hybrid that has a `kind`")
    data = {}
    for name, hint in settings_of(made).items():
        value = getattr(rule, name)
        if isinstance(value, Configured):
            value = to_spec(value)
        elif isinstance(value, tuple):
            value = tuple(to_spec(each) if isinstance(each, Pattern) else each for each in value)
        data[_stored_name(name, value) if _either(hint) else name] = value
    return spec_of(made)(**data)


def kinds() -> dict[str, type[Spec]]:
    """Return the classes of all specs by their kinds."""
    return {**{rule.kind: spec_of(rule) for rule in registered(Configured)}, "dense": DenseSpec}


@lru_cache(maxsize=256)
def spec_of(rule: Any) -> type[Spec]:
    """Return the model of a registered rule's data."""
    defaults = defaults_of(rule)
    stored: dict[str, Any] = {"kind": (Literal[rule.kind], rule.kind)}
    for name, hint in settings_of(rule).items():
        if _either(hint):
            stored["share"] = (_stored(_only(float, hint)) | None, None)
            stored["blocks"] = (_stored(_only(int, hint)) | None, None)
            continue
        default = defaults.get(name, ...)
        stored[name] = (_stored(hint), to_spec(default) if isinstance(default, Configured) else default)
    made: Any = create_model(f"{rule.__name__}Spec", __base__=Spec, __doc__=rule.__doc__, **stored)
    made.rule = rule
    return cast(type[Spec], made)


def _stored(hint: Any) -> Any:
    """Return the annotation of a setting in a model: strict, and bounded also where the setting has no bound."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _bounded(of[0], of[1])
    if origin in (typing.Union, types.UnionType):
        return reduce(or_, map(_stored, of))
    if origin is tuple and of[-1] is not Ellipsis:
        return types.GenericAlias(tuple, tuple(map(_stored, of)))
    if origin is tuple:
        listed: Any = types.GenericAlias(tuple, (_stored(of[0]), ...))
        if of[0] is Pattern:
            return Annotated[listed, Field(min_length=2, max_length=MAX_PARTS)]
        return Annotated[listed, Field(max_length=MAX_SEQUENCES if typing.get_origin(of[0]) is tuple else MAX_LISTED)]
    if isinstance(hint, type) and issubclass(hint, Configured):
        rule: Any = hint
        return spec_of(rule) if rule.kind else Annotated[SerializeAsAny[Spec], PlainValidator(_reader(rule))]
    simple = {int: Int, float: Annotated[float, Strict()], bool: Flag, type(None): None}
    if origin is not Literal and hint not in simple:
        raise TypeError(f"no policy can store a setting of type {hint}")
    return hint if origin is Literal else simple[hint]


def _bounded(number: type, bounds: Range) -> Any:
    least: dict[str, Any] = {"gt" if bounds.above else "ge": bounds.least}
    most = min(bounds.most, bounds.most if bounds.stored is None else bounds.stored)
    if number is int:
        most = int(min(most, 2**63 - 1 if bounds.least < -MOST else MOST))
    return Annotated[number, Strict(), Field(**least, le=None if most == float("inf") else most)]


def _either(hint: Any) -> bool:
    """Return whether a setting is a share or a number of blocks."""
    return _only(int, hint) is not None and _only(float, hint) is not None


def _only(number: type, hint: Any) -> Any:
    """Return the part of an annotation that takes numbers of a type; None if there is none."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [part for each in of if (part := _only(number, each)) is not None]
        return reduce(or_, parts) if parts else None
    if origin is tuple and of[-1] is Ellipsis:
        part = _only(number, of[0])
        return None if part is None else types.GenericAlias(tuple, (part, ...))
    return hint if (of[0] if origin is Annotated else hint) is number else None


def _stored_name(name: str, value: Any) -> str:
    values = value if isinstance(value, tuple) else (value,)
    if len({type(each) for each in values}) > 1:
        raise ValueError(f"`{name}` must be shares or block counts, not both, got {value}; use one rule for each")
    return "blocks" if isinstance(values[0], int) else "share"


def _reader(*bases: type[Any]) -> Callable[[Any], Any]:
    """Return the validator of specs whose rules are subclasses of some classes, those registered later included."""

    def read(value: Any) -> Any:
        if isinstance(value, Spec):
            return value
        specs = tuple(map(spec_of, registered(*bases)))
        return _adapter((*specs, DenseSpec) if Hybrid in bases else specs).validate_python(value)

    return read


@cache
def _adapter(specs: tuple[type[Spec], ...]) -> TypeAdapter[Any]:
    any_of: Any = Annotated[reduce(or_, specs), Field(discriminator="kind")]
    return TypeAdapter(any_of)


def _unpickled(text: str) -> Any:
    return _read_any(json.loads(text))


AttentionSpec: TypeAlias = Annotated[SerializeAsAny[Spec], PlainValidator(_reader(Pattern, Selector, Hybrid))]
_read_any = _reader(Configured, Hybrid)


def parts(rule: AttentionRule | None) -> tuple[Pattern | None, Selector | None]:
    """Return the pattern and the selector of a rule, None for a missing part."""
    if isinstance(rule, Hybrid):
        return rule.pattern, rule.selector
    if isinstance(rule, Selector):
        return None, rule
    return rule, None


def rule_of(pattern: Pattern | None, selector: Selector) -> AttentionRule:
    """Return the rule of a pattern and a selector."""
    return selector if pattern is None else Hybrid(pattern, selector)


def budget_of(selector: Selector) -> Any:
    """Return a selector's budget: one number, or a tuple with one per head."""
    return getattr(selector, selector.budget_field)


def with_budget(selector: Selector, value: Any) -> Selector:
    """Return the same selector with another budget."""
    return replace(selector, **{selector.budget_field: value})  # type: ignore[type-var]  # every selector is a dataclass


def for_heads(rule: AttentionRule, which: Sequence[int]) -> AttentionRule:
    """Return the rule for a subset of its heads, given by their indices."""
    pattern, selector = parts(rule)
    if selector is None or not isinstance(budget_of(selector), tuple):
        return rule
    budgets = tuple(budget_of(selector)[at] for at in which)
    return rule_of(pattern, with_budget(selector, budgets))
