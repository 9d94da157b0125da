# SPDX-License-Identifier: Apache-2.0
"""Tasks that a budget must pass during the search, and that count in the costs of heads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.result import ANSWERED, KNOWN, interval_of, prefers
from dynaxx.lab.tasks.score import answer_task, closed_book, other_answers
from dynaxx.lab.tasks.suite import TaskSample, make_task, named_tasks
from dynaxx.lab.texts import split_text
from dynaxx.lab.tune.result import TaskTrial

if TYPE_CHECKING:
    from dynaxx.policy import Policy

SAMPLES = 3  # prompts per task in trials
COST_SAMPLES = 2  # other prompts per task for the costs of heads
LIMIT = 0.1  # allowed mean loss of a task in nats per answer token, equal to the policy's tolerance


class HeldTasks:
    """Scores tasks under a policy. Tasks that the dense model cannot solve are reported as not informative.

    Args:
        model, tokenizer: the model and its tokenizer.
        text: the sample; its calibration half is the haystack.
        names: tasks and suites.
        tokens: length of the prompts.
        seed: seed of the samples; validation uses other samples.
        remember: function that stores the result of a step by name.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        names: Sequence[str],
        tokens: int,
        seed: int,
        remember: Callable[[str, Callable[[], Any]], Any],
    ) -> None:
        self._model, self._tokenizer, self._remember = model, tokenizer, remember
        self.tasks = named_tasks(names)
        haystack = Haystack(split_text(text).calibration)
        self._make = lambda name, index: make_task(name, tokenizer, haystack, tokens, seed=seed, index=index)
        self._samples = {name: [self._make(name, -1 - i) for i in range(SAMPLES)] for name in self.tasks}

    def for_costs(self, task: str, number: int) -> TaskSample:
        """Return a prompt for the costs of heads, 0 <= number < COST_SAMPLES. Trials have other prompts."""
        return self._make(task, -1 - SAMPLES - number)

    def under(self, policy: Policy, key: str) -> tuple[TaskTrial, ...]:
        """Return the loss of each task under the policy whose budgets have this key."""
        from dynaxx.integrations.transformers.apply_policy import apply

        rows = []
        for name, samples in self._samples.items():
            dense = self._remember(f"task {name} alone", partial(self._answers, name, True))
            known, match = (statistics.mean(each[i] for each in dense) for i in (2, 1))
            gaps = [each[0] - each[3] for each in dense if each[3] is not None]
            learns = statistics.mean(each[0] for each in dense) - known >= KNOWN
            informative = match >= ANSWERED or (learns and prefers(interval_of(gaps) if gaps else None))
            drop = 0.0
            if informative:
                with apply(self._model, policy):
                    sparse = self._remember(f"task {name} {key}", partial(self._answers, name, False))
                drop = statistics.mean(a[0] - b[0] for a, b in zip(dense, sparse, strict=True))
            assert len(samples) == len(dense), "samples of another run"
            rows.append(TaskTrial(name, drop, informative, drop <= LIMIT))
        return tuple(rows)

    def _answers(self, name: str, alone: bool) -> list[tuple[float, float, float, float | None]]:
        """Return the log-probability and the match of each sample.

        Alone, also the log-probability without the context, and that of other samples' answers.
        """
        found = []
        samples = self._samples[name]
        for index, sample in enumerate(samples):
            others = other_answers(samples, index) if alone else ()
            answer = answer_task(self._model, self._tokenizer, sample, generate=False, others=others)
            known = closed_book(self._model, sample) if alone else 0.0
            found.append((answer.logprob, answer.match, known, answer.others))
        return found
