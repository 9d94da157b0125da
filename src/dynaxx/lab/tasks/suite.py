# SPDX-License-Identifier: Apache-2.0
"""Tasks by name, and samples of them with a given number of tokens and seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.tasks.counting import COUNTING_TASKS
from dynaxx.lab.tasks.example import Example, TaskDefinition
from dynaxx.lab.tasks.graphs import GRAPH_TASKS, TRACKING_TASKS
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.needles import NEEDLE_TASKS
from dynaxx.lab.tasks.questions import QUESTION_TASKS
from dynaxx.lab.tasks.rounds import ROUND_TASKS
from dynaxx.lab.texts import ids_of, start_of

RULER = (*NEEDLE_TASKS, *TRACKING_TASKS, *COUNTING_TASKS, *QUESTION_TASKS)
MORE = (*ROUND_TASKS, *GRAPH_TASKS)
DEFINITIONS = {task.name: task for task in (*RULER, *MORE)}
SUITES = {
    "ruler": tuple(task.name for task in RULER),
    "long": tuple(DEFINITIONS),  # RULER and all other tasks
}
SPARE = 16  # tokens that a model may generate beyond the answer
FITTED = 0.01  # a prompt may be shorter than requested by this share, in addition to one sentence or line


@dataclass(frozen=True)
class TaskSample:
    """One prompt of a task as tokens."""

    task: str
    tokens: int  # the requested length, which includes the prompt and the generated tokens
    prompt: Tensor  # (1, n) int64
    question: Tensor  # (1, m) int64, the last tokens of the prompt, which contain the question
    answer: Tensor  # (a,) int64, the correct continuation
    ends: tuple[int, ...]  # number of tokens of `answer` up to the end of each answer
    answers: tuple[str, ...]  # the answers as text


def named_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks of names and suites without duplicates.

    Raises:
        ValueError: a name is unknown.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in SUITES and name not in DEFINITIONS:
            raise ValueError(
                f"no task {name!r}: there are {', '.join(DEFINITIONS)}, and the suites {', '.join(SUITES)}"
            )
        found |= dict.fromkeys(SUITES.get(name, (name,)))
    return tuple(found)


def make_task(
    task: str, tokenizer: Any, haystack: Haystack, tokens: int, *, seed: int = 0, index: int = 0
) -> TaskSample:
    """Make sample number `index` of a task with the longest prompt that fits into `tokens` with its answer.

    Raises:
        ValueError: the smallest prompt of the task is longer than `tokens`.
    """
    definition, begin = DEFINITIONS[task], start_of(tokenizer)

    def made(size: int) -> tuple[Example, int]:
        example = definition.make(random.Random(f"{seed} {task} {tokens} {index}"), haystack, size, tokens)
        return example, len(begin) + len(ids_of(tokenizer, example.prompt)) + len(
            ids_of(tokenizer, "".join(example.pieces))
        ) + SPARE

    example = _longest(definition, made, tokens)
    pieces = [ids_of(tokenizer, piece) for piece in example.pieces]
    ends = tuple(sum(map(len, pieces[: i + 1])) for i in range(len(pieces)))
    return TaskSample(
        task=task,
        tokens=tokens,
        prompt=torch.tensor([begin + ids_of(tokenizer, example.prompt)], dtype=torch.int64, device="cpu"),
        question=torch.tensor([begin + ids_of(tokenizer, example.question)], dtype=torch.int64, device="cpu"),
        answer=torch.tensor([each for piece in pieces for each in piece], dtype=torch.int64, device="cpu"),
        ends=ends,
        answers=example.answers,
    )


def _longest(definition: TaskDefinition, made: Callable[[int], tuple[Example, int]], tokens: int) -> Example:
    """Return the largest example that fits, found by interpolation to within `FITTED`."""
    low = definition.least
    example, shortest = made(low)
    if shortest > tokens:
        raise ValueError(f"task {definition.name} needs prompts of {shortest:,} tokens at least, got {tokens:,}")
    low_tokens, high = shortest, 2 * low
    while True:
        longer, count = made(high)
        if count > tokens:
            break
        example, low, low_tokens, high = longer, high, count, 2 * high
    high_tokens = count
    while high - low > 1 and tokens - low_tokens > FITTED * tokens:
        share = (tokens - low_tokens) / max(1, high_tokens - low_tokens)
        size = min(high - 1, max(low + 1, low + int(share * (high - low))))
        tried, count = made(size)
        if count > tokens:
            high, high_tokens = size, count
        else:
            example, low, low_tokens = tried, size, count
    return example
