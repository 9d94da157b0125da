# SPDX-License-Identifier: Apache-2.0
"""Haystack of sentences and words from a real text, and generated names to hide in it."""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Sequence

_ADJECTIVES = """
    amber ancient bitter blunt bold brave brief bright broad calm careful clever coastal crisp curly damp daring deep
    distant dusty eager early empty faint famous fancy fierce flat foggy formal fragile fresh frozen gentle giant golden
    grand hasty heavy hidden hollow humble icy idle jolly keen late lazy little lively lonely loud lucky mellow mighty
    modest muddy narrow noble northern odd pale patient plain polite proud quick quiet rapid rare restless rough round
    royal rusty salty shallow sharp shiny shy silent silver simple sleepy slim smooth solid sour spare steady steep
    stern stiff strict sudden sunny sweet swift tall tame tidy tiny tough upper vast vivid warm wild wise
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
_NOUNS = """
    anchor apple arrow badge bakery barrel basket beacon bell blanket boat bottle bridge bucket button cabin camera
    candle canoe carpet castle cave chair cherry cliff clock cloud coat compass cottage cradle creek crown curtain desk
    diary donkey drum eagle engine falcon feather fence ferry field flute forest fountain garden gate glacier guitar
    hammer harbor helmet hill horn island jacket kettle kite ladder lamp lantern lemon letter library lion magnet maple
    market meadow mirror mountain needle oak ocean onion orchard otter paddle palace parrot pencil piano pigeon pillow
    planet plum pocket pond puppet quarry rabbit raft ribbon river road roof rope saddle sailor shell shovel spoon
    station stove tailor temple tiger tower train tunnel turtle umbrella valley village violin wagon walnut whistle
    willow window
"""
NOUNS = tuple(_NOUNS.split())
NOISE = "The lake is still. The bread is warm. The wind is low. Off we walk. Round the hill and home."
WORD = re.compile(r"\b[a-z]{4,10}\b")
MAX_WORDS = 40  # words in a sentence
MAX_COLLISIONS = 100  # consecutive draws of used names after which longer names are drawn
MAX_LETTERS = 30  # letters in a word; longer ones are lines and tables with many tokens
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")


class Haystack:
    """Sentences and words of a real text.

    Args:
        text: at least a few hundred words. A longer haystack repeats it.

    Raises:
        ValueError: the text is too short.
    """

    def __init__(self, text: str) -> None:
        flat = " ".join(text.split())
        self.sentences = tuple(part for whole in SENTENCE_END.split(flat) if whole for part in _cut(whole))
        self.words = tuple(sorted(set(WORD.findall(text))))
        if len(self.sentences) < 20 or len(self.words) < 100:
            raise ValueError(
                "tasks need a text of at least 20 sentences and 100 different words in Latin letters, got "
                f"{len(self.sentences)} and {len(self.words)}; give a longer text, or a built-in one such as 'pydoc'"
            )

    def stretch(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` consecutive sentences from a random place, continuing at the start after the end."""
        start = rng.randrange(len(self.sentences))
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(count)]

    def vocabulary(self, rng: random.Random, count: int) -> list[str]:
        """Draw `count` different words of the text, or pairs of words if it has too few."""
        drawn = rng.sample(self.words, min(count, len(self.words)))
        known = set(drawn)
        while len(drawn) < count:
            pair = pair_of_words(rng)
            if pair not in known:
                known.add(pair)
                drawn.append(pair)
        return drawn


def _cut(sentence: str) -> list[str]:
    """Divide a sentence into parts of at most `MAX_WORDS` words, because it may be a whole table."""
    words = [word for word in sentence.split() if len(word) <= MAX_LETTERS]
    return [" ".join(words[start : start + MAX_WORDS]) for start in range(0, len(words), MAX_WORDS)]


def hide(rng: random.Random, text: Sequence[str], facts: Sequence[str]) -> list[str]:
    """Return a text's sentences with facts inserted in order at random places."""
    places = sorted(rng.randrange(len(text) + 1) for _ in facts)
    found: list[str] = []
    done = 0
    for place, fact in zip(places, facts, strict=True):
        found += [*text[done:place], fact]
        done = place
    return [*found, *text[done:]]


def different(rng: random.Random, kind: str, count: int, taken: set[str] | None = None) -> list[str]:
    """Draw `count` different "words", "numbers" or "uuids" that are not in `taken`, and add them to it."""
    draw = {"words": pair_of_words, "numbers": number, "uuids": new_uuid}[kind]
    taken = set() if taken is None else taken
    found: list[str] = []
    collisions = 0
    while len(found) < count:
        name = draw(rng) if collisions < MAX_COLLISIONS else f"{draw(rng)}-{draw(rng)}"
        if name in taken:
            collisions += 1
            continue
        taken.add(name)
        found.append(name)
        collisions = 0 if collisions < MAX_COLLISIONS else collisions
    return found


def pair_of_words(rng: random.Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: random.Random, digits: int = 7) -> str:
    """Draw a number with this many digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def new_uuid(rng: random.Random) -> str:
    """Draw a random UUID (version 4)."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def different_letters(rng: random.Random, count: int, length: int, of: str = string.ascii_uppercase) -> list[str]:
    """Draw `count` different names of so many letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[letters(rng, length, of)] = None
    return list(names)


def letters(rng: random.Random, count: int, of: str = string.ascii_uppercase) -> str:
    """Draw letters."""
    return "".join(rng.choice(of) for _ in range(count))
