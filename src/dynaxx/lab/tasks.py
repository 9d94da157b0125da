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
class RetrievalSample:
    """One prompt and the answer that ends it."""

    task: str
    ids: Tensor  # (1, tokens) int64, the answer included
    answer_tokens: int


def make_samples(
    tokenizer: Any, haystack: Sequence[int], tokens: int, samples: int, seed: int = 0
) -> list[RetrievalSample]:
    """`samples` prompts of each task, `tokens` long, their facts at depths from early to late.

    Raises:
        ValueError: `tokens` leaves no room for text between the facts, or the haystack is shorter.
    """
    rng = random.Random(seed)
    made = []
    for task in TASKS:
        for index in range(samples):
            facts, question, answer = _task(task, rng)
            ends = _ids(tokenizer, f"\n\n{question}"), _ids(tokenizer, answer)
            inserts = [_ids(tokenizer, f"\n\n{fact}\n\n") for fact in facts]
            room = tokens - sum(map(len, (*ends, *inserts)))
            if room < tokens // 4 or len(haystack) < room:
                raise ValueError(
                    f"retrieval tasks need prompts of some hundred tokens within {len(haystack):,} tokens of text, "
                    f"got {tokens:,}"
                )
            start = rng.randrange(len(haystack) - room + 1)
            depths = sorted(rng.random() for _ in facts) if len(facts) > 1 else [(index + 0.5) / samples]
            ids, done = [], 0
            for insert, depth in zip(inserts, depths, strict=True):
                ids += [*haystack[start + done : start + int(depth * room)], *insert]
                done = int(depth * room)
            ids += [*haystack[start + done : start + room], *ends[0], *ends[1]]
            made.append(RetrievalSample(task, torch.tensor([ids]), len(ends[1])))
    return made


def _task(task: str, rng: random.Random) -> tuple[list[str], str, str]:
    """Facts to hide, in order, the question, and its answer."""
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


@torch.no_grad()
def score(model: Any, sample: RetrievalSample) -> tuple[float, float]:
    """Mean log-probability of the answer's tokens in nats, and the share of them that were the most likely one."""
    ids = sample.ids.to(model.device)
    hidden = model.base_model(ids[:, :-1], use_cache=False)[0][:, -sample.answer_tokens :]
    logprobs = logits_of(model, hidden).log_softmax(-1)[0]
    answer = ids[0, -sample.answer_tokens :]
    found = logprobs.gather(1, answer[:, None])[:, 0]
    return float(found.mean()), float((logprobs.argmax(-1) == answer).float().mean())


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
