# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that damage documents, as trees and as bytes."""

import copy
import json
import os
import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MINUTES = float(os.environ.get("DYNAXX_FUZZ_MINUTES", "0"))  # of all targets together; 0 is a few examples of each

ODD_VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    16,
    64,
    2**31 - 1,
    2**31,
    2**53,
    2**63,
    -(2**63),
    10**19,
    10**30,
    int("9" * 4000),
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    1e-300,
    1e300,
    -1e300,
    float("inf"),
    float("nan"),
    "",
    "x",
    "all",
    "NaN",
    "1",
    "\x1b[2J",
    "\ud800",
    "\u202e",
    "a" * 5000,
    "__class__",
    "kind",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"kind": "dense"},
    [0] * 1000,
    ["\x00"],
    {"kind": "causal"},
    {"kind": "sink", "tokens": 3},
    {"kind": "full"},
)

CHANGES = ("replace", "replace", "replace", "remove", "rename", "repeat", "move", "nest", "tweak")

leaves = st.one_of(st.sampled_from(ODD_VALUES), st.integers(), st.floats(), st.text(max_size=20))
trees = st.recursive(
    leaves,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=8), each, max_size=4),
    max_leaves=8,
)


def places(tree, path=()):
    """Return every path within a document."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def spoiled(draw, documents):
    """Change one of the documents up to four times: replace, remove, repeat, rename, move or nest a value."""
    tree = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(0, 4))):
        paths = [path for path in places(tree) if path]
        if not paths:
            break
        *parent_path, key = draw(st.sampled_from(paths))
        parent = at(tree, parent_path)
        change = draw(st.sampled_from(CHANGES))
        if change == "replace":
            parent[key] = copy.deepcopy(draw(trees))  # the next change must not spoil what is drawn from
        elif change == "remove":
            del parent[key]
        elif change == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=12))] = parent.pop(key)
        elif change == "repeat" and isinstance(parent, list):
            parent += [copy.deepcopy(parent[key])] * draw(st.integers(1, 80))
        elif change == "move":
            parent[key] = copy.deepcopy(at(tree, draw(st.sampled_from(paths))))
        elif change == "nest":
            for _ in range(draw(st.integers(1, 40))):
                parent[key] = {"kind": "any_of", "parts": [parent[key], {"kind": "sink", "tokens": 1}]}
        elif change == "tweak" and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = draw(st.integers(-4, 200)) if isinstance(parent[key], int) else draw(st.floats(0, 1))
    return tree


@st.composite
def spoiled_text(draw, documents):
    """Return a damaged document as bytes, possibly truncated, with bytes changed or inserted."""
    data = json.dumps(draw(spoiled(documents))).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 3)))):
        start, stop = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        data = data[:start] + draw(st.binary(max_size=8)) + data[min(stop, start + 40) :]
    return data


def check_words(error):
    """Fail if a message is empty, very long, or has control characters."""
    said = str(error)
    assert said
    assert len(said) < 100_000
    assert not set(said) & set(map(chr, (*range(9), *range(11, 32), 127, 0x202E)))


def run(target, share, examples=30):
    """Run a `given` test with a few examples, or repeatedly for its share of the requested minutes."""
    once = settings(
        max_examples=200 if MINUTES else examples,
        deadline=None,
        database=None,
        derandomize=not MINUTES,
        suppress_health_check=list(HealthCheck),
    )(target)
    end = time.monotonic() + 60 * MINUTES * share
    once()
    while time.monotonic() < end:
        once()
