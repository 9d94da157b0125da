# SPDX-License-Identifier: Apache-2.0
"""Python passes structures whose fields equal those of the core's sources, in the same order."""

import ctypes
import re

from dynaxx.core.structures import fields, structure
from dynaxx.kernels.runtime import core_arguments as arguments

KINDS = {"int64_t": "q", "double": "d"}  # as in the module `struct`; Q is a pointer


def kinds_of(name):
    """Return the kinds of a struct's fields; a struct inside of it has the kinds of its fields."""
    return "".join("Q" if pointer else KINDS.get(of) or kinds_of(of) for _, of, pointer in fields(name))


def test_structures_have_the_fields_of_structs():
    args = structure("SummaryArgs")
    assert [name for name, _ in args._fields_] == [
        "cache", "low", "high", "element", "strides", "scale", "scale_strides", "bound", "new_tokens", "threads"
    ]  # fmt: skip
    types = dict(args._fields_)
    assert types["cache"] is ctypes.POINTER(structure("CacheArgs"))
    assert (types["low"], types["element"], types["bound"]) == (ctypes.c_void_p, ctypes.c_int64, ctypes.c_double)
    assert types["strides"] is ctypes.c_int64 * 4
    assert dict(structure("TokenForwardArgs")._fields_)["common"] is structure("TokenArgs")
    assert "block_size" in dict(structure("TokenArgs")._fields_)
    for name in ("Plan", "BackwardArgs", "TokenBackwardArgs", "BestBlocksArgs"):
        assert ctypes.sizeof(structure(name)) == 8 * len(kinds_of(name))


def test_packed_arguments_of_the_forward():
    kinds = re.sub(r"(\d+)(\w)", lambda found: int(found[1]) * found[2], arguments._FORWARD.format)
    assert kinds.replace(" ", "") == "=" + kinds_of("ForwardArgs")
