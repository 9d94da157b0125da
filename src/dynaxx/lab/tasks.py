"""Retrieval tasks made on the spot: facts hidden in real text, a question at the end, an answer to score.

Answers are scored by teacher forcing: the log-probability of each answer token, and whether it was the most likely one.
So even a small model, which would not generate the whole answer, shows how well it still finds what it needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.perplexity import logits_of

PLACES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Tromsø", "Perth", "Dakar", "Lima", "Riga", "Hanoi", "Oslo", "Cairo")
TASKS = ("needle", "several keys", "variable tracing")
KEYS = 6  # facts of which one is asked for
CHAIN = 3  # variables that pass a value on


@dataclass(frozen=True)
class Answer:
    """Where the answer of one task stands in a prompt."""

    task: str
    start: int
    stop: int


@dataclass(frozen=True)
class RetrievalSample:
    """One prompt that holds the facts of every task, and at its end each question with its answer."""

    ids: Tensor  # (1, tokens) int64
    answers: tuple[Answer, ...]


def make_samples(
    tokenizer: Any, haystack: Sequence[int], tokens: int, samples: int, seed: int = 0
) -> list[RetrievalSample]:
    """`samples` prompts, `tokens` long; the needle stands from early to late, the other facts anywhere.

    One prompt asks the questions of all tasks one after the other, so one pass scores them all; no question or answer
    says anything about another.

    Raises:
        ValueError: `tokens` leaves no room for text between the facts, or the haystack is shorter.
    """
    rng = random.Random(seed)
    return [_sample(tokenizer, haystack, tokens, (index + 0.5) / samples, rng) for index in range(samples)]


def _sample(
    tokenizer: Any, haystack: Sequence[int], tokens: int, needle_depth: float, rng: random.Random
) -> RetrievalSample:
    places = rng.sample(PLACES, 1 + KEYS)
    facts: list[tuple[float, str]] = []
    ending: list[int] = []
    spans = []
    for task in TASKS:
        own, question, answer = _task(task, places, rng)
        depths = [needle_depth] if task == "needle" else sorted(rng.random() for _ in own)
        facts += zip(depths, own, strict=True)
        ending += _ids(tokenizer, f"\n\n{question}")
        answer_ids = _ids(tokenizer, answer)
        spans.append((task, len(ending), len(ending) + len(answer_ids)))
        ending += answer_ids
    inserts = [(depth, _ids(tokenizer, f"\n\n{fact}\n\n")) for depth, fact in sorted(facts)]
    room = tokens - len(ending) - sum(len(insert) for _, insert in inserts)
    if room < tokens // 4 or len(haystack) < room:
        raise ValueError(
            "retrieval tasks need prompts of some hundred tokens "
            f"within {len(haystack):,} tokens of text, got {tokens:,}"
        )
    start, done, ids = rng.randrange(len(haystack) - room + 1), 0, []
    for depth, insert in inserts:
        ids += [*haystack[start + done : start + int(depth * room)], *insert]
        done = int(depth * room)
    ids += haystack[start + done : start + room]
    return RetrievalSample(
        torch.tensor([[*ids, *ending]]),
        tuple(Answer(task, len(ids) + begin, len(ids) + end) for task, begin, end in spans),
    )


def _task(task: str, places: list[str], rng: random.Random) -> tuple[list[str], str, str]:
    """Facts to hide, in order, the question, and its answer; the first place is the needle's."""
    number = lambda: f"{rng.randrange(10_000, 100_000)}"
    if task == "variable tracing":
        names = ["".join(rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 3)) for _ in range(CHAIN)]
        value = number()
        facts = [f"VAR {names[0]} = {value}"]
        facts += [f"VAR {name} = VAR {before}" for before, name in pairwise(names)]
        return facts, f"The variables that have the value {value} are:", " " + ", ".join(names)
    own = places[:1] if task == "needle" else places[1:]
    numbers = [number() for _ in own]
    facts = [f"The secret number of {place} is {value}." for place, value in zip(own, numbers, strict=True)]
    asked = rng.randrange(len(own))
    return facts, f"The secret number of {own[asked]} is", f" {numbers[asked]}"


@torch.no_grad()
def score(model: Any, sample: RetrievalSample) -> dict[str, tuple[float, float]]:
    """By task: mean log-probability of the answer's tokens in nats, and the share of them that were the most likely."""
    ids = sample.ids.to(model.device)
    hidden = model.base_model(ids[:, :-1], use_cache=False)[0][0]
    scores = {}
    for answer in sample.answers:
        logprobs = logits_of(model, hidden[answer.start - 1 : answer.stop - 1]).log_softmax(-1)
        wanted = ids[0, answer.start : answer.stop]
        found = logprobs.gather(1, wanted[:, None])[:, 0]
        scores[answer.task] = (float(found.mean()), float((logprobs.argmax(-1) == wanted).float().mean()))
    return scores


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
