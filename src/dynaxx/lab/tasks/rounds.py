# SPDX-License-Identifier: Apache-2.0
"""Multi-round reference: repeat the answer to one of two equal requests in a conversation.

The task follows MRCR ("Michelangelo", arXiv 2409.12640, and OpenAI's data set of that name). Answers are sentences of
real text, so that the requested ones look like all others. The answer starts with a mark, which shows that the model
follows the instructions.
"""

from __future__ import annotations

import random
import string

from dynaxx.lab.tasks.example import Example, TaskDefinition
from dynaxx.lab.tasks.haystack import NOUNS, Haystack, letters

FORMS = ("note", "sketch", "letter", "speech", "story", "summary", "review", "notice")
EQUAL = 2  # requests that are the same
ORDINALS = ("first", "second")
FEWEST, WORDS = 5, 24  # words of an answer


def rounds(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Make a conversation of `size` rounds, two of them with the same request."""
    mark, asked = letters(rng, 6, string.ascii_letters), rng.randrange(EQUAL)
    wanted = (rng.choice(FORMS), rng.choice(NOUNS))
    places, text = random.Random(rng.random()), random.Random(rng.random())  # the text does not move with the size
    others = [(form, topic) for form in FORMS for topic in NOUNS if (form, topic) != wanted]
    requests = [places.choice(others) for _ in range(size - EQUAL)]
    for _ in range(EQUAL):
        requests.insert(places.randrange(len(requests) + 1), wanted)
    replies = [" ".join(sentence.split()[:WORDS]) for sentence in _unequal(text, haystack, size)]
    turns = [
        f"User: Write a {form} about the {topic}.\nAssistant: {reply}"
        for (form, topic), reply in zip(requests, replies, strict=True)
    ]
    answer = [reply for request, reply in zip(requests, replies, strict=True) if request == wanted][asked]
    form, topic = wanted
    return Example(
        "Below is a conversation. Its last request is about an earlier answer.\n\n" + "\n".join(turns) + "\n",
        f"User: Write {mark} and then the {ORDINALS[asked]} {form} about the {topic} again, word for word.\n"
        f"Assistant: {mark}",
        (answer,),
        (f" {answer}",),
    )


def _unequal(rng: random.Random, haystack: Haystack, count: int) -> list[str]:
    """Return different beginnings of consecutive sentences from a random place, numbered if the text has too few."""
    whole = haystack.stretch(rng, len(haystack.sentences))
    found: dict[str, None] = {}
    for sentence in whole:
        words = sentence.split()
        if len(words) >= FEWEST:
            found.setdefault(" ".join(words[:WORDS]))
        if len(found) == count:
            break
    some = list(found)
    return [*some, *(f"{some[i % len(some)].rstrip('.')} ({i})." for i in range(count - len(some)))]


ROUND_TASKS = (
    TaskDefinition(
        "rounds", "one of two answers to the same request in a conversation", rounds, grade="ratio", least=4
    ),
)
