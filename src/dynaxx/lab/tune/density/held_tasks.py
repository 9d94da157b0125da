# SPDX-License-Identifier: Apache-2.0
"""Tasks that a budget must pass during the search, and that count in the costs of heads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dynaxx.integrations.transformers.apply_policy import apply
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.result import ANSWERED, KNOWN, interval_of, prefers
from dynaxx.lab.tasks.score import answer_task, closed_book, other_answers
from dynaxx.lab.tasks.suite import TaskSample, make_task, named_tasks
from dynaxx.lab.texts import split_text
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import TaskTrial
from dynaxx.policy import Policy

SAMPLES = 3  # prompts per task that a trial starts with, and that it adds while the task is undecided
MAX_SAMPLES = 24  # prompts per task in a trial, at most
CLEAR = 2.0  # standard errors between a mean loss and the limit that decide
COST_SAMPLES = 2  # other prompts per task for the costs of heads
LIMIT = 0.1  # allowed mean loss of a task in nats per answer token, equal to the policy's tolerance

Answers = tuple[float, float, float, float | None]  # log-probability, match, log-probability alone, of other answers


class HeldTasks:
    """Scores tasks under a policy. Tasks that the dense model cannot solve are reported as not informative.

    Args:
        model, tokenizer: the model and its tokenizer.
        text: the sample; its calibration half is the haystack.
        options: the tasks to hold, the length of prompts, and the seed of samples; validation uses other samples.
        remember: function that stores the result of a step by name.
        has_time: whether an undecided task may get more prompts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        options: TuneOptions,
        remember: Callable[[str, Callable[[], Any]], Any],
        has_time: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model, self._tokenizer, self._remember = model, tokenizer, remember
        self.tasks = named_tasks(options.hold)
        haystack, tokens, seed = Haystack(split_text(text).calibration), options.tokens, options.seed
        self._make = lambda name, index: make_task(name, tokenizer, haystack, tokens, seed=seed, index=index)
        self._has_time, self._made = has_time, dict[tuple[str, int], list[TaskSample]]()
        for name in self.tasks:
            self._prompts(name, 0)  # refuses a task that needs longer prompts

    def for_costs(self, task: str, number: int) -> TaskSample:
        """Return a prompt for the costs of heads, 0 <= number < COST_SAMPLES. Trials have other prompts."""
        return self._make(task, -1 - MAX_SAMPLES - number)

    def under(self, policy: Policy, key: str) -> tuple[TaskTrial, ...]:
        """Return the loss of each task under the policy whose budgets have this key."""
        return tuple(self._trial(name, policy, key) for name in self.tasks)

    def _trial(self, name: str, policy: Policy, key: str) -> TaskTrial:
        """Compare dense and sparse answers, a few prompts at a time, until the mean loss is clear or prompts end."""
        drops: list[float] = []
        for part in range(MAX_SAMPLES // SAMPLES):
            dense = self._remember(f"task {name} alone {part}", partial(self._answers, name, part, True))
            if part == 0 and not _is_informative(dense):
                return TaskTrial(name, 0.0, False, True)
            with apply(self._model, policy):
                sparse = self._remember(f"task {name} {key} {part}", partial(self._answers, name, part, False))
            drops += [a[0] - b[0] for a, b in zip(dense, sparse, strict=True)]
            error = statistics.stdev(drops) / len(drops) ** 0.5
            if abs(statistics.mean(drops) - LIMIT) > CLEAR * error or not self._has_time():
                break
        drop = statistics.mean(drops)
        return TaskTrial(name, drop, True, drop <= LIMIT)

    def _prompts(self, name: str, part: int) -> list[TaskSample]:
        """Return a part of a task's prompts, made once."""
        if (name, part) not in self._made:
            indices = range(part * SAMPLES, (part + 1) * SAMPLES)
            self._made[name, part] = [self._make(name, -1 - index) for index in indices]
        return self._made[name, part]

    def _answers(self, name: str, part: int, alone: bool) -> list[Answers]:
        """Return the log-probability and the match of each of some prompts.

        Alone, also the log-probability without the context, and that of other prompts' answers.
        """
        found, samples = [], self._prompts(name, part)
        for index, sample in enumerate(samples):
            others = other_answers(samples, index) if alone else ()
            answer = answer_task(self._model, self._tokenizer, sample, generate=False, others=others)
            known = closed_book(self._model, sample) if alone else 0.0
            found.append((answer.logprob, answer.match, known, answer.others))
        return found


def _is_informative(dense: Sequence[Answers]) -> bool:
    """Return whether the dense model solves a task, or its answers follow from the prompts."""
    match, known = statistics.mean(each[1] for each in dense), statistics.mean(each[2] for each in dense)
    gaps = [each[0] - each[3] for each in dense if each[3] is not None]
    learns = statistics.mean(each[0] for each in dense) - known >= KNOWN
    return match >= ANSWERED or (learns and prefers(interval_of(gaps) if gaps else None))
