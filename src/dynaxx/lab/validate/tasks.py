# SPDX-License-Identifier: Apache-2.0
"""Retrieval tasks: facts hidden in real text, a question at the end, and an answer to score.

Answers are scored by teacher forcing, with the log-probability of each answer token and whether it was the most likely
one. Even a small model that would not generate the whole answer then shows how well it finds the facts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from dynaxx.lab.tasks.suite import TaskSample
from dynaxx.lab.texts import ids_of, start_of

PLACES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Tromsø", "Perth", "Dakar", "Lima", "Riga", "Hanoi", "Oslo", "Cairo")
TASKS = ("needle", "several keys", "variable tracing")
KEYS = 6  # facts in a prompt, one of which is the answer
CHAIN = 3  # variables that pass a value on


def make_samples(tokenizer: Any, haystack: Sequence[int], tokens: int, samples: int, seed: int = 0) -> list[TaskSample]:
    """Draw `samples` prompts of `tokens` tokens for each task.

    The fact of a single-fact task moves from early to late in the prompt; other facts are at random places.

    Raises:
        ValueError: `tokens` leaves no room for text between the facts, or the haystack is too short.
    """
    rng, begin = random.Random(seed), start_of(tokenizer)
    made = []
    for index in range(samples):
        for task in TASKS:
            facts, question, answer = _task(task, rng)
            ending = ids_of(tokenizer, f"\n\n{question}")
            inserts = [ids_of(tokenizer, f"\n\n{fact}\n\n") for fact in facts]
            room = tokens - len(ending) - sum(map(len, inserts))
            if room < tokens // 4 or len(haystack) < room:
                raise ValueError(
                    "retrieval tasks need prompts of some hundred tokens "
                    f"within {len(haystack):,} tokens of text, got {tokens:,}; give more `tokens` or more text"
                )
            depths = [(index + 0.5) / samples] if len(facts) == 1 else sorted(rng.random() for _ in facts)
            start, done, ids = rng.randrange(len(haystack) - room + 1), 0, []
            for insert, depth in zip(inserts, depths, strict=True):
                ids += [*haystack[start + done : start + int(depth * room)], *insert]
                done = int(depth * room)
            ids += [*haystack[start + done : start + room], *ending]
            ids[: len(begin)] = begin
            prompt = torch.tensor([ids], dtype=torch.int64, device="cpu")
            wanted = torch.tensor(ids_of(tokenizer, answer), dtype=torch.int64, device="cpu")
            ends = tuple(range(1, len(wanted) + 1))  # each token is right or wrong by itself
            made.append(TaskSample(task, tokens, prompt, prompt[:, -len(ending) :], wanted, ends, (answer,)))
    return made


def _task(task: str, rng: random.Random) -> tuple[list[str], str, str]:
    """Return the facts to hide in order, the question, and its answer."""
    number = lambda: f"{rng.randrange(10_000, 100_000)}"
    if task == "variable tracing":
        names = ["".join(rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 3)) for _ in range(CHAIN)]
        value = number()
        facts = [f"VAR {names[0]} = {value}"]
        facts += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
        return facts, f"The variables that have the value {value} are:", " " + ", ".join(names)
    places = rng.sample(PLACES, 1 if task == "needle" else KEYS)
    numbers = [number() for _ in places]
    facts = [f"The secret number of {place} is {value}." for place, value in zip(places, numbers, strict=True)]
    asked = rng.randrange(len(places))
    return facts, f"The secret number of {places[asked]} is", f" {numbers[asked]}"
