# SPDX-License-Identifier: Apache-2.0
"""RULER's eight needle tasks: find the values of keys in real text, in repeated lines or among other needles."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dynaxx.lab.tasks.example import Example, TaskDefinition, in_a_row, listed
from dynaxx.lab.tasks.haystack import NOISE, Haystack, different, hide

KINDS = {"words": "word", "numbers": "number", "uuids": "UUID"}


@dataclass(frozen=True)
class Needles:
    """RULER's settings of a needle task."""

    haystack: str = "essay"  # "repeat": one repeated line, "essay": real text, "needle": needles with other keys
    key: str = "words"  # "words", "numbers" or "uuids"
    value: str = "numbers"  # the same
    keys: int = 1  # number of keys in the text
    values: int = 1  # number of values of each key
    queries: int = 1  # number of keys in the question

    def __call__(self, rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
        """Hide needles in a haystack of `size` sentences, lines or needles."""
        kind, count = KINDS[self.value], max(self.keys, self.queries)
        taken: set[str] = set()
        keys = different(rng, self.key, count, taken)
        values = [different(rng, self.value, self.values, taken) for _ in keys]
        needle = lambda key, value: f"One of the secret {kind}s of {key} is {value}."
        facts = [needle(key, value) for key, under in zip(keys, values, strict=True) for value in under]
        rng.shuffle(facts)
        asked = rng.sample(range(count), self.queries)
        answers = tuple(value for index in asked for value in values[index])
        places = random.Random(rng.random())  # independent of how many numbers the haystack draws
        if self.haystack == "essay":
            context = " ".join(hide(places, haystack.stretch(places, size), facts))
        else:
            lines = [NOISE] * size
            if self.haystack == "needle":
                names = different(places, self.key, size, taken)
                lines = [needle(name, different(places, self.value, 1, taken)[0]) for name in names]
            context = "\n".join(hide(places, lines, facts))
        one = len(answers) == 1
        whom = listed([keys[index] for index in asked])
        what = f"secret {kind}" if one else f"secret {kind}s"
        return Example(
            f"The text below hides {'a ' if one else 'some '}{what}. Keep {'it' if one else 'them'} in mind: the "
            f"question at the end asks for {'it' if one else 'them'}.\n{context}\n",
            f"Question: {'What is the' if one else 'What are all the'} {what} of {whom} in the text above?\n"
            f"Answer: {'The' if one else 'All the'} {what} of {whom} in the text above {'is' if one else 'are'}",
            answers,
            in_a_row(answers),
        )


NEEDLE_TASKS = (
    TaskDefinition("niah_single_1", "one number in a repeated line", Needles("repeat")),
    TaskDefinition("niah_single_2", "one number in real text", Needles()),
    TaskDefinition("niah_single_3", "one UUID in real text", Needles(value="uuids")),
    TaskDefinition("niah_multikey_1", "one of four numbers in real text", Needles(keys=4)),
    TaskDefinition(
        "niah_multikey_2", "one number in a text of nothing but numbers under other words", Needles("needle")
    ),
    TaskDefinition("niah_multikey_3", "the same with UUIDs under UUIDs", Needles("needle", "uuids", "uuids")),
    TaskDefinition("niah_multivalue", "four numbers under one word in real text", Needles(values=4)),
    TaskDefinition("niah_multiquery", "four numbers under four words in real text", Needles(queries=4)),
)
