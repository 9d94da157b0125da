# SPDX-License-Identifier: Apache-2.0
"""Run a suite of tasks dense and under a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.result import SuiteResult, TaskRow, judged
from dynaxx.lab.tasks.score import answer_task, closed_book, other_answers
from dynaxx.lab.tasks.suite import TaskSample, make_task, named_tasks

LENGTHS = (1024, 4096)
SAMPLES = 5


@dataclass(frozen=True)
class SuitePlan:
    """Tasks, lengths and number of samples of a suite."""

    tasks: tuple[str, ...] = ("ruler",)  # names of tasks and suites
    lengths: tuple[int, ...] = LENGTHS  # prompt lengths in tokens
    samples: int = SAMPLES  # number of prompts for each task and length
    generate: bool = True  # continue greedy decoding after a wrong token, to grade the generated text

    def __post_init__(self) -> None:
        """Check the names of the tasks, the number of samples and the lengths."""
        named_tasks(self.tasks)
        if self.samples < 1:
            raise ValueError(f"`samples` must be at least 1, got {self.samples}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"`lengths` must be prompt lengths in tokens, got {self.lengths}")

    @property
    def rows(self) -> int:
        """Return the number of pairs of a task and a length."""
        return len(named_tasks(self.tasks)) * len(self.lengths)


def run_suite(
    model: Any,
    tokenizer: Any,
    applied: Callable[[], AbstractContextManager[Any]],
    text: str,
    plan: SuitePlan,
    *,
    limit: float | None = 0.1,
    seed: int = 0,
    say: Callable[[float, str], None] = lambda share, note: None,
    remember: Callable[[str, Callable[[], Any]], Any] = lambda name, compute: compute(),
) -> SuiteResult:
    """Compare a model with itself under a policy on every task and length of a plan.

    Args:
        model: a causal language model of transformers, dense.
        tokenizer: the model's.
        applied: function that returns a context in which the model runs sparse.
        text: real text for haystacks.
        plan: tasks, lengths and samples.
        limit: allowed loss in nats per answer token.
        seed: seed of the samples.
        say: callback with the completed share of the work and a note.
        remember: function that stores the figures of a task and a length by name.
    """
    haystack = Haystack(text)
    rows: list[TaskRow] = []
    skipped: list[str] = []
    for tokens in plan.lengths:
        for task in named_tasks(plan.tasks):
            say(0, f"{task}, {tokens:,} tokens")
            try:
                made = [make_task(task, tokenizer, haystack, tokens, seed=seed, index=i) for i in range(plan.samples)]
            except ValueError as error:
                skipped.append(str(error))
                say(1 / plan.rows, "")
                continue
            answer = partial(_answers, model, tokenizer, applied, made, plan)
            rows.append(judged(task, tokens, **remember(f"{task} at {tokens} tokens", answer), limit=limit))
            say(1 / plan.rows, f"{task}, {tokens:,} tokens: {rows[-1].verdict}")
    return SuiteResult(tuple(rows), limit, seed, tuple(skipped))


def _answers(
    model: Any,
    tokenizer: Any,
    applied: Callable[[], AbstractContextManager[Any]],
    made: Sequence[TaskSample],
    plan: SuitePlan,
) -> dict[str, Any]:
    """Return the figures that `judged` takes, as plain data."""
    before = [
        answer_task(model, tokenizer, sample, generate=plan.generate, others=other_answers(made, index))
        for index, sample in enumerate(made)
    ]
    with applied() as handle:
        after = [answer_task(model, tokenizer, sample, generate=plan.generate) for sample in made]
        ran_sparse = handle is None or handle.stats()["sparse_calls"] > 0
    return {
        "dense": [(each.logprob, each.match) for each in before],
        "sparse": [(each.logprob, each.match) for each in after],
        "known": [closed_book(model, sample) for sample in made],
        "others": [each.others for each in before],
        "ran_sparse": ran_sparse,
    }
