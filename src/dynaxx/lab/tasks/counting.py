# SPDX-License-Identifier: Apache-2.0
"""RULER's two counting tasks: find the common words of a list, and the frequent words of a coded text."""

from __future__ import annotations

import random
import string

from dynaxx.lab.tasks.example import Example, TaskDefinition, in_a_row
from dynaxx.lab.tasks.haystack import Haystack, different_letters

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
    vocabulary = different_letters(rng, max(FREQUENT + 1, tokens // 50), CODED, string.ascii_lowercase)
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
