# SPDX-License-Identifier: Apache-2.0
"""Definition of a task: a prompt of any size and its answers, as text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dynaxx.lab.tasks.haystack import Haystack

Grade = Literal["all", "any", "ratio", "f1"]


@dataclass(frozen=True)
class Example:
    """One prompt and its answers."""

    context: str  # the text before the question: instructions and the haystack with its facts
    question: str  # the end of the prompt: the question and the beginning of the answer
    answers: tuple[str, ...]  # the answers in a correct continuation, in the order of `pieces`
    pieces: tuple[str, ...]  # the correct continuation, divided so that piece i ends with answer i

    def __post_init__(self) -> None:
        """Check that each answer ends its piece of the text."""
        assert len(self.answers) == len(self.pieces), "an answer is without a piece"
        assert all(piece.endswith(answer) for piece, answer in zip(self.pieces, self.answers, strict=True)), self.pieces

    @property
    def prompt(self) -> str:
        """Return the context and the question."""
        return self.context + self.question


Make = Callable[[random.Random, Haystack, int, int], Example]


@dataclass(frozen=True)
class TaskDefinition:
    """A task that generates prompts of any size.

    Attributes:
        name: name of the task, which is RULER's for its tasks.
        what: one-sentence description for the report.
        make: function from (random numbers, haystack, size, tokens) to an example. The same random numbers give the
            same facts at every size; only the haystack grows. `tokens` is the target length, on which some definitions
            depend.
        grade: grading of a generated continuation. "all" is the share of answers that it contains, "any" is 1 if it
            contains one, "ratio" is the similarity to the answer if both begin alike, and "f1" compares sets of names.
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


def in_a_row(answers: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return the pieces of " a, b, c"."""
    return tuple(f"{',' if index else ''} {answer}" for index, answer in enumerate(answers))
