# SPDX-License-Identifier: Apache-2.0
"""ctypes structures made from the structs of the core's sources, which list each field once, with its meaning."""

from __future__ import annotations

import re
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

from dynaxx.core.build import sources

OK, NO_MEMORY, BAD_INPUT, FAILED = range(4)


def raise_for_status(code: int) -> None:
    """Raise the exception for a status code of the core; return for OK.

    Raises:
        MemoryError: the core could not allocate its working memory.
        ValueError: arguments contradict one another or exceed the limits of the core.
        RuntimeError: any other failure.
    """
    if code == OK:
        return
    if code == NO_MEMORY:
        raise MemoryError("the CPU core could not allocate its working memory")
    if code == BAD_INPUT:
        raise ValueError(
            "the CPU core refused its arguments: sizes contradict one another, or the tensors of a layout were changed "
            "while they were read"
        )
    raise RuntimeError(f"the CPU core failed with status {code}")


NAMES = {"grain": "block_size"}  # the core's word: Python's word
NUMBERS: dict[str, Any] = {"int64_t": c_int64, "double": c_double}


@cache
def structure(name: str) -> Any:
    """Return the structure of a struct: pointers to other structs are typed, structs of strides are arrays."""
    listed = [(field, _type_of(of, pointer)) for field, of, pointer in fields(name)]
    return type(name, (Structure,), {"_fields_": listed})


def fields(name: str) -> list[tuple[str, str, bool]]:
    """Return the name of each field of a struct, its type in C++, and whether it is a pointer to that."""
    found = []
    for of, declared in _structs()[name]:
        for each in declared.split(","):
            field = each.strip().lstrip("*").strip()
            found.append((NAMES.get(field, field), of, "*" in each))
    return found


def _type_of(of: str, pointer: bool) -> Any:
    if pointer:
        return POINTER(structure(of)) if of in _structs() else c_void_p
    if of.endswith("Strides"):
        return c_int64 * len(fields(of))
    return NUMBERS.get(of) or structure(of)


@cache
def _structs() -> dict[str, list[tuple[str, str]]]:
    """Map each struct of the sources to its declarations."""
    found = {}
    for path in sources():
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
            found[name] = re.findall(r"^  (?:const )?([\w:]+) ?([\w*, \n]+);", body, re.MULTILINE)
    return found
