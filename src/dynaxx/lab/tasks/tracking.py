# SPDX-License-Identifier: Apache-2.0
"""RULER's variable tracking: name all variables in a chain of assignments that have a value."""

from __future__ import annotations

import random
from itertools import pairwise

from dynaxx.lab.tasks.example import Example, TaskDefinition, in_a_row
from dynaxx.lab.tasks.haystack import NOISE, Haystack, hide, letters

HOPS = 4
EXAMPLE_LINES, EXAMPLE_LETTERS = 12, 3  # in the solved example


def variable_tracking(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Hide one chain of five variables in `size` repeated lines, after a solved example with shorter names."""
    solved = _chain(rng, EXAMPLE_LINES, EXAMPLE_LETTERS)
    asked = _chain(rng, size, 5)
    return Example(
        f"{solved.prompt}{''.join(solved.pieces)}\n\n{asked.context}", asked.question, asked.answers, asked.pieces
    )


def _chain(rng: random.Random, lines: int, length: int) -> Example:
    names: list[str] = []
    while len(names) <= HOPS:
        name = letters(rng, length)
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    facts = [f"VAR {names[0]} = {value}", *(f"VAR {name} = VAR {before}" for before, name in pairwise(names))]
    context = "\n".join(hide(random.Random(rng.random()), [NOISE] * lines, facts))
    return Example(
        f"The text below hides a chain of variables that are set to each other. Follow it.\n\n{context}\n",
        f"Question: Which variables have the value {value} in the text above?\n"
        f"Answer: By the chain above, {len(names)} variables have the value {value}:",
        tuple(names),
        in_a_row(names),
    )


TRACKING_TASKS = (TaskDefinition("vt", "five variables of one chain in a repeated line", variable_tracking),)
