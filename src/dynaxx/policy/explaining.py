# SPDX-License-Identifier: Apache-2.0
"""`explain_errors`: pydantic's errors in the words of a policy, with the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dynaxx.policy.document import Document
from dynaxx.policy.specs import kinds
from dynaxx.printable import printable

MAX_ERRORS = 20  # errors shown per document
_FIXES = {
    "missing": "add it",
    "union_tag_not_found": "add `kind`",
}
_GONE = {  # kinds of policies of 0.1, and the fix
    "cluster_globals": "it is gone; use `top_k`, whose blocks hold more of the attention at the same density",
    **dict.fromkeys(
        ("key_clusters", "last_query_probe", "sim_hash"),
        "it is gone; use `mean_query`, which finds more of the attention in less time",
    ),
}


def explain_errors(error: ValidationError) -> str:
    """Return pydantic's errors, one line each: the field, the error, the value found, the fix."""
    lines: dict[str, None] = {}
    for found in error.errors(include_url=False):
        lines[_explain(found, error.title)] = None
        if len(lines) > MAX_ERRORS:
            break
    shown = list(lines)[:MAX_ERRORS]
    return "\n".join([*shown, "and more"] if len(lines) > MAX_ERRORS else shown)


def _explain(found: Any, document: str) -> str:
    where = ".".join(printable(part, most=80) for part in found["loc"] if not _is_branch(part))
    if found["type"] == "extra_forbidden":
        fix: str | None = _unknown_fix(found["loc"], document)
    elif found["type"] == "union_tag_invalid":
        tag = found["ctx"]["tag"]
        fix = _GONE.get(tag) or _near(tag, {*kinds()}) or None
    else:
        fix = _FIXES.get(found["type"])
    ours = found["type"] == "value_error"  # our own message, which may have several lines
    message = printable(found["msg"].removeprefix("Value error, "), most=4000, keep="\n" if ours else "")
    line = f"`{where}`: {message}" if where else message
    if found["type"] not in ("missing", "value_error"):
        line += f", got {printable(repr(found['input']), most=80)}"
    return f"{line}; {fix}" if fix else line


def _unknown_fix(where: tuple[int | str, ...], document: str) -> str:
    """Return the fix for an unknown field: the known field with nearly the same spelling, if there is one."""
    within = next((part for part in reversed(where[:-1]) if isinstance(part, str)), "")
    return _near(str(where[-1]), _fields_of(within, document)) or "remove it; this version does not know it"


def _near(name: str, known: set[str]) -> str:
    """Return a question for the known name with nearly the same spelling, or an empty string."""
    close = difflib.get_close_matches(name, sorted(known), 1, 0.7)
    return f"did you mean `{close[0]}`?" if close else ""


def _is_branch(part: Any) -> bool:
    """Return whether a part of a location names a branch of a union and not a field."""
    return isinstance(part, str) and (
        part in kinds() or "[" in part or part in _TYPES or part.startswith("constrained-")
    )


_TYPES = ("int", "float", "str", "bool")


def _documents(base: type[BaseModel] = Document) -> Iterator[type[BaseModel]]:
    """Yield every class of documents."""
    for document in base.__subclasses__():
        yield document
        yield from _documents(document)


def _documents_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of documents that a field takes."""
    if isinstance(annotation, type) and issubclass(annotation, Document):
        yield annotation
    for part in get_args(annotation):
        yield from _documents_in(part)


def _fields_of(within: str, document: str) -> set[str]:
    """Return the names of the fields in a part of a location: a field, the kind of a rule, or "" for the document."""
    if within in kinds():
        return set(kinds()[within].model_fields)
    names = set[str]()
    for each in _documents():
        if not within and each.__name__ == document:
            names.update(each.model_fields)
        field = each.model_fields.get(within)
        for inner in () if field is None else _documents_in(field.annotation):
            names.update(inner.model_fields)
    return names
