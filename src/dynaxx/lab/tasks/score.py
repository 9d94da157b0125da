# SPDX-License-Identifier: Apache-2.0
"""Score a model on a task: the likelihood of the correct answer, and whether greedy decoding finds it.

The prompt is one prefill, and the answer is decoded token by token with its cache. Greedy decoding follows the correct
answer while its next token is the most likely one. At the first difference the cache is copied, so one prefill gives
both the likelihood of the correct answer and the generated text.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.perplexity import logits_of
from dynaxx.lab.tasks.example import Grade
from dynaxx.lab.tasks.suite import DEFINITIONS, SPARE, TaskSample

NAME = re.compile(r"\b[0-9a-f]{6}\b")
OTHERS = 3  # wrong answers that are scored after a prompt
BEGINNING = 8  # letters that a "ratio" answer must begin with


@dataclass(frozen=True)
class TaskAnswer:
    """Score of a model on one sample."""

    logprob: float  # mean log-probability of the answer's tokens in nats
    match: float  # grade of the greedily decoded text, 0 to 1
    others: float | None = None  # mean log-probability of wrong answers after the same prompt, None if there are none


@torch.no_grad()
def answer_task(
    model: Any, tokenizer: Any, sample: TaskSample, *, generate: bool = True, others: Sequence[Tensor] = ()
) -> TaskAnswer:
    """Score one sample.

    Args:
        model: a causal language model of transformers.
        tokenizer: the tokenizer of the model, which decodes the generated tokens.
        sample: a sample of `make_task`.
        generate: continue greedy decoding after a wrong token. If False, an answer is found if each of its tokens is
            the most likely one after the correct tokens before it.
        others: wrong answers (a,) to score after the same prompt, such as `other_answers`.
    """
    answer = sample.answer.to(model.device)
    cache, fed, found = None, sample.prompt.to(model.device), 0.0
    right: list[bool] = []
    written: list[int] | None = None
    wrong: list[float] = []
    for token in answer:
        logits, cache = _step(model, fed, cache)
        if not right:
            wrong = [_continued(model, logits, cache, each) for each in others]
        logprobs = logits.log_softmax(-1)
        found += float(logprobs[token])
        best = logprobs.argmax()
        right.append(bool(best == token))
        if not right[-1] and generate and written is None:
            before = [int(each) for each in answer[: len(right) - 1]]
            more = len(answer) + SPARE - len(before)
            written = [*before, *_decode(model, copy.deepcopy(cache), best, more)]
        fed = token.view(1, 1)
    if all(right):
        match = 1.0
    elif written is not None:
        match = grade(DEFINITIONS[sample.task].grade, tokenizer.decode(written), sample.answers)
    else:
        starts = (0, *sample.ends)
        each = [all(right[a:b]) for a, b in zip(starts, sample.ends, strict=False)]
        match = sum(each) / len(each)
    return TaskAnswer(found / len(answer), match, sum(wrong) / len(wrong) if wrong else None)


def other_answers(samples: Sequence[TaskSample], index: int) -> list[Tensor]:
    """Return the answers of the next samples of a task that differ from the answer of sample `index`."""
    following = [samples[(index + 1 + i) % len(samples)] for i in range(min(OTHERS, len(samples) - 1))]
    return [each.answer for each in following if each.answers != samples[index].answers]


def _continued(model: Any, logits: Tensor, cache: Any, answer: Tensor) -> float:
    """Return the mean log-probability of an answer after a prompt with these last logits. The cache stays unchanged."""
    answer = answer.to(logits.device)
    rows = [logits[None]]
    if len(answer) > 1:
        kept = with_cache(model.base_model, copy.deepcopy(cache))
        rows.append(logits_of(model, model.base_model(answer[None, :-1], use_cache=True, **kept)[0])[0])
    return float(torch.cat(rows).log_softmax(-1).gather(1, answer[:, None]).mean())


@torch.no_grad()
def closed_book(model: Any, sample: TaskSample) -> float:
    """Return the mean log-probability of the answer after the question alone, without its context."""
    ids = torch.cat([sample.question, sample.answer[None]], dim=1).to(model.device)
    hidden = model.base_model(ids[:, :-1], use_cache=False)[0]
    logprobs = logits_of(model, hidden[0, sample.question.shape[1] - 1 :]).log_softmax(-1)
    return float(logprobs.gather(1, sample.answer.to(model.device)[:, None]).mean())


def _step(model: Any, fed: Tensor, cache: Any) -> tuple[Tensor, Any]:
    out = model.base_model(fed, use_cache=True, **with_cache(model.base_model, cache))
    return logits_of(model, out[0][:, -1])[0], cache_of(out)


def _decode(model: Any, cache: Any, token: Tensor, count: int) -> list[int]:
    """Decode greedily from `token` on."""
    written = [int(token)]
    while len(written) < count:
        logits, cache = _step(model, token.view(1, 1), cache)
        token = logits.argmax()
        written.append(int(token))
    return written


def grade(kind: Grade, text: str, answers: Sequence[str]) -> float:
    """Grade a text from 0 to 1 by the task's definition, ignoring case."""
    text = text.lower()
    wanted = [answer.lower() for answer in answers]
    if kind == "ratio":
        text, answer = text.strip()[: len(wanted[0])], wanted[0]
        return difflib.SequenceMatcher(None, text, answer).ratio() if text[:BEGINNING] == answer[:BEGINNING] else 0.0
    if kind == "f1":
        first = text.strip().splitlines()[:1] or [""]
        named = set(NAME.findall(first[0]))
        hit = len(named & set(wanted))
        return 2 * hit / (len(named) + len(wanted)) if named else 0.0
    held = [answer in text for answer in wanted]
    return float(any(held)) if kind == "any" else sum(held) / len(held)
