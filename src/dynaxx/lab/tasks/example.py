# SPDX-License-Identifier: Apache-2.0
"""The form of a task: a prompt and its answers as text, made at any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dynaxx.lab.tasks.haystack import Haystack

Grade = Literal["all", "any", "ratio", "f1"]


@dataclass(frozen=True)
class Example:
    """One prompt and its answers.

    Attributes:
        context: what comes before the question: instructions and the haystack with its facts.
        question: the question and the beginning of the answer, the end of the prompt.
        answers: what a right continuation holds, in the order of `pieces`.
        pieces: the right continuation, cut so that piece i ends with answer i; joined they follow the prompt.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    pieces: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.answers) == len(self.pieces), "an answer is without a piece"
        assert all(piece.endswith(answer) for piece, answer in zip(self.pieces, self.answers, strict=True)), self.pieces

    @property
    def prompt(self) -> str:
        return self.context + self.question


Make = Callable[[random.Random, Haystack, int, int], Example]


@dataclass(frozen=True)
class TaskDefinition:
    """A task that can be made at any size.

    Attributes:
        name: RULER's name for it, where it is one of RULER's.
        what: one sentence for a reader of the report.
        make: returns an example from (random numbers, haystack, size, tokens). The same numbers give the same facts at
            every size; only the haystack grows with the size. `tokens` is the length that is aimed at, on which some
            definitions depend.
        grade: how a generated continuation is graded: "all" is the share of answers that it holds, "any" is 1 if it
            holds one, "ratio" how similar it is to the answer if it begins like it, "f1" compares sets of names.
        least: the smallest size.
    """

    name: str
    what: str
    make: Make
    grade: Grade = "all"
    least: int = 1


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Return "a", "a and b" or "a, b, and c"."""
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def in_a_row(answers: list[str] | tuple[str, ...], separator: str = ",") -> tuple[str, ...]:
    """Return the pieces of " a, b, c"."""
    return tuple(f"{separator if index else ''} {answer}" for index, answer in enumerate(answers))
