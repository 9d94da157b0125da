# SPDX-License-Identifier: Apache-2.0
"""Python and the ONNX operator pass structures whose fields equal those of the core's sources, in the same order."""

import ctypes
import re
from functools import cache

import pytest

from dynaxx.core.build import sources
from dynaxx.kernels.decode import cpu as decode
from dynaxx.kernels.runtime import core_arguments as arguments
from dynaxx.kernels.selection.cpu import best_blocks, block_scores
from dynaxx.trained.tokens.kernels.cpu import attention as tokens
from dynaxx.trained.tokens.kernels.cpu import decode as token_decode
from dynaxx.trained.tokens.kernels.cpu import indexer

STRUCTURES = {
    "Plan": arguments.WorkPlan,
    "BackwardArgs": arguments.BackwardArgs,
    "CacheArgs": decode.CacheArgs,
    "DecodeArgs": decode.DecodeArgs,
    "SummaryArgs": decode.SummaryArgs,
    "SelectArgs": decode.SelectArgs,
    "TokenArgs": tokens.TokenArgs,
    "TokenForwardArgs": tokens.TokenForwardArgs,
    "TokenBackwardArgs": tokens.TokenBackwardArgs,
    "TokenDecodeArgs": token_decode.TokenDecodeArgs,
    "IndexArgs": indexer.IndexArgs,
    "BlockScoreArgs": block_scores.BlockScoreArgs,
    "BestBlocksArgs": best_blocks.BestBlocksArgs,
    "ListBlocksArgs": best_blocks.ListBlocksArgs,
}
NAMES = {"grain": "block_size"}  # the core's word: Python's word
KINDS = {"int64_t": "q", "double": "d"}  # as in the module `struct`; Q is a pointer


@cache
def structs():
    """Map each struct of the sources to its declarations."""
    found = {}
    for path in sources():
        text = re.sub(r"//.*", "", path.read_text())
        for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
            found[name] = re.findall(r"^  (?:const )?([\w:]+) ?([\w*, \n]+);", body, re.MULTILINE)
    return found


def fields_of(name):
    """Return (field, kinds) of a struct; a struct inside of it has the kinds of its fields."""
    found = []
    for of, declared in structs()[name]:
        for each in declared.split(","):
            field = each.strip().lstrip("*").strip()
            kind = "Q" if "*" in each else KINDS.get(of) or "".join(kinds for _, kinds in fields_of(of))
            found.append((NAMES.get(field, field), kind))
    return found


def kinds_of(of):
    """Return the kinds of a ctypes type."""
    if issubclass(of, ctypes.Array):
        return kinds_of(of._type_) * of._length_
    if issubclass(of, ctypes.Structure):
        return "".join(kinds_of(each) for _, each in of._fields_)
    return {ctypes.c_int64: "q", ctypes.c_double: "d"}.get(of, "Q")


@pytest.mark.parametrize("name", STRUCTURES)
def test_python_passes_what_the_core_reads(name):
    assert [(field, kinds_of(of)) for field, of in STRUCTURES[name]._fields_] == fields_of(name)


def test_packed_arguments_of_the_forward():
    kinds = re.sub(r"(\d+)(\w)", lambda found: int(found[1]) * found[2], arguments._FORWARD.format)
    assert kinds.replace(" ", "") == "=" + "".join(kinds for _, kinds in fields_of("ForwardArgs"))


def test_the_onnx_operator_passes_what_the_core_reads():
    assert fields_of("DecodeStep") == fields_of("DecodeArgs")
