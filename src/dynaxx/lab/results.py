# SPDX-License-Identifier: Apache-2.0
"""`Result`: the base of the tools' results, whose JSON follows from their fields."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar


class Result:
    """A frozen dataclass whose JSON has its fields, and the properties that `derived` names."""

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the derived properties for JSON."""
        document: dict[str, Any] = plain(self)
        return document


def plain(value: Any) -> Any:
    """Return JSON data: the fields of objects by name, lists for tuples, text for paths."""
    if is_dataclass(value):
        names = (*(each.name for each in fields(value)), *getattr(value, "derived", ()))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
