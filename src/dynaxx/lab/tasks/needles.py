# SPDX-License-Identifier: Apache-2.0
"""RULER's eight needle tasks: find the values of keys in real text, in repeated lines or among other needles.

Its two counting tasks: find the common words of a list, and the frequent words of a coded text.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from dynaxx.lab.tasks.example import Example, TaskDefinition, in_a_row, listed
from dynaxx.lab.tasks.haystack import NOISE, Haystack, different, hide, letters

KINDS = {"words": "word", "numbers": "number", "uuids": "UUID"}


@dataclass(frozen=True)
class Needles:
    """RULER's settings of a needle task.

    Attributes:
        haystack: "repeat" is one repeated line, "essay" is real text, and "needle" is needles with other keys.
        key, value: "words", "numbers" or "uuids".
        keys: number of keys in the text.
        values: number of values of each key.
        queries: number of keys in the question.
    """

    haystack: str = "essay"
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

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


COMMON = 10  # number of words to find
LONG = 4096  # tokens from which words are repeated more often
CODED = 6  # letters of a coded word
ALPHA = 2.0  # exponent of Zipf's law
FREQUENT = 3
ZETA_2 = 1.6449340668482264  # sum of k ** -ALPHA over all k


def common_words(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """List ten common words and `size` others, after a solved example.

    Each common word occurs 30 times and each other word 3 times. In short prompts they occur 6 times and once.
    """
    long = tokens >= LONG
    solved = _word_list(rng, haystack, *((30, 10, 3) if long else (10, 3, 1)))
    asked = _word_list(rng, haystack, size, *((30, 3) if long else (6, 1)))
    return Example(
        f"{solved.prompt}{''.join(solved.pieces)}\n\n{asked.context}", asked.question, asked.answers, asked.pieces
    )


def _word_list(rng: random.Random, haystack: Haystack, others: int, often: int, seldom: int) -> Example:
    drawn = random.Random(rng.random())
    words = haystack.vocabulary(drawn, COMMON + others)
    common, rest = words[:COMMON], words[COMMON:]
    entries = common * often + rest * seldom
    drawn.shuffle(entries)
    return Example(
        "The words of the numbered list below are there more than once, some of them far more often than others. "
        f"Keep those in mind.\n{_numbered(entries)}\n",
        f"Question: Which {COMMON} words are the most common ones in the list above?\n"
        f"Answer: The {COMMON} most common words in the list above are:",
        tuple(common),
        tuple(f" {index}. {word}" for index, word in enumerate(common, 1)),
    )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{index}. {word}" for index, word in enumerate(words, 1))


def frequent_words(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Write `size` coded words by Zipf's law.

    Dots are the most frequent. The answer is the next three words.
    """
    vocabulary: list[str] = []
    known: set[str] = set()
    while len(vocabulary) < max(FREQUENT + 1, tokens // 50):
        word = letters(rng, CODED, string.ascii_lowercase)
        if word not in known:
            known.add(word)
            vocabulary.append(word)
    vocabulary[0] = "..."
    counts = [int(size * rank**-ALPHA / ZETA_2) for rank in range(1, len(vocabulary) + 1)]
    text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    random.Random(rng.random()).shuffle(text)
    answers = vocabulary[1 : 1 + FREQUENT]
    return Example(
        "Count how often each word of the coded text below is there, and find the three most frequent.\n"
        f"{' '.join(text)}\n",
        "Question: Which three words are the most frequent ones in the coded text above? The dots do not count.\n"
        "Answer: The three most frequent words in the coded text above are:",
        tuple(answers),
        in_a_row(answers),
    )


COUNTING_TASKS = (
    TaskDefinition("cwe", "the ten common words of a numbered list", common_words),
    TaskDefinition("fwe", "the three frequent words of a coded text", frequent_words, least=64),
)
