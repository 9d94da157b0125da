# SPDX-License-Identifier: Apache-2.0
"""RULER's two question-answering tasks with generated passages: a fact from one passage, and one from two passages.

RULER uses passages and questions of SQuAD and HotpotQA, which this module does not contain. Each passage describes an
invented person or building. The first task asks for a fact of one passage. The second task names a building and asks
for a fact about its designer, which is in another passage.
"""

from __future__ import annotations

import random
from itertools import cycle

from dynaxx.lab.tasks.example import Example, TaskDefinition
from dynaxx.lab.tasks.haystack import ADJECTIVES, NOUNS, Haystack

_CITIES = """
    Lisbon Nairobi Osaka Quito Perth Dakar Lima Riga Hanoi Oslo Cairo Bergen Porto Tunis Kyoto Turin Bremen Gdansk
    Sydney Boston Denver Havana Krakow Leeds Malmo Naples Ottawa Prague Seville Tampere Utrecht Vilnius Zagreb Zurich
"""
CITIES = tuple(_CITIES.split())
_FIRST = """
    Ada Boris Clara Dario Elena Felix Greta Hugo Ida Jonas Karin Lucas Marta Nils Olga Paul Rosa Simon Tessa Ulrich
    Vera Walter Xenia Yusuf Zora Anton Bruno Celia Dora Emil
"""
FIRST = tuple(_FIRST.split())
_LAST = """
    Adler Brandt Cordova Dahl Ekberg Fontaine Gruber Holloway Ibarra Jansen Kessler Lindqvist Moreau Novak Okafor Petrov
    Quist Rossi Santos Tanaka Ueda Vargas Weiss Yilmaz Zeller Abbott Bauer Castell Duval Ferraro
"""
LAST = tuple(_LAST.split())
_FIELDS = """
    chemistry botany music law history geology medicine physics painting astronomy economics sculpture zoology
"""
FIELDS = tuple(_FIELDS.split())
BUILDINGS = ("bridge", "library", "theatre", "museum", "lighthouse", "station", "observatory", "hospital")


class _World:
    """Invented people and buildings with a passage each, varied by real sentences."""

    def __init__(self, rng: random.Random, haystack: Haystack, people: int) -> None:
        names = [f"{first} {last}" for first in FIRST for last in LAST]
        rng.shuffle(names)
        self.people = [
            (name if i < len(names) else f"{name} ({i // len(names) + 1})")
            for i, name in zip(range(people), cycle(names), strict=False)
        ]
        self.city = [rng.choice(CITIES) for _ in self.people]
        self.field = [rng.choice(FIELDS) for _ in self.people]
        self.building = [
            f"{rng.choice(ADJECTIVES).title()} {rng.choice(NOUNS).title()} {rng.choice(BUILDINGS).title()} No. {i + 1}"
            for i in range(people)
        ]
        self.year = [rng.randrange(1850, 1990) for _ in self.people]
        self.filler = haystack.stretch(rng, 2 * people)

    def person(self, i: int) -> str:
        return (
            f"{self.people[i]}\n{self.people[i]} was born in {self.city[i]} in {self.year[i]} and studied "
            f"{self.field[i]}. {self.filler[2 * i]}"
        )

    def work(self, i: int) -> str:
        return (
            f"{self.building[i]}\nThe {self.building[i]} was designed by {self.people[i]} and opened in "
            f"{self.year[i] + 40}. {self.filler[2 * i + 1]}"
        )


def one_passage(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Ask where one of `size` people was born."""
    asked = rng.random()
    world = _World(rng, haystack, size)
    i = int(asked * size)
    return _asked(
        rng, [world.person(each) for each in range(size)], f"In which city was {world.people[i]} born?", world.city[i]
    )


def two_passages(rng: random.Random, haystack: Haystack, size: int, tokens: int) -> Example:
    """Ask where the designer of one of `size` buildings was born, with the passages of both in the prompt."""
    asked = rng.random()
    world = _World(rng, haystack, size)
    i = int(asked * size)
    passages = [passage(each) for each in range(size) for passage in (world.person, world.work)]
    question = f"In which city was the designer of the {world.building[i]} born?"
    return _asked(rng, passages, question, world.city[i])


def _asked(rng: random.Random, passages: list[str], question: str, answer: str) -> Example:
    rng.shuffle(passages)
    context = "\n\n".join(f"Passage {index}: {passage}" for index, passage in enumerate(passages, 1))
    return Example(
        f"Answer the question at the end from the passages below, with the answer alone.\n\n{context}\n\n",
        f"Question: {question}\nAnswer:",
        (answer,),
        (f" {answer}",),
    )


QUESTION_TASKS = (
    TaskDefinition("qa_1", "a question that one of many passages answers", one_passage, grade="any", least=2),
    TaskDefinition("qa_2", "a question that takes two of many passages", two_passages, grade="any", least=2),
)
