# SPDX-License-Identifier: Apache-2.0
"""Run a suite of tasks dense and under a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.result import SuiteResult, TaskRow, judged
from dynaxx.lab.tasks.score import TaskAnswer, answer_task, closed_book, other_answers
from dynaxx.lab.tasks.suite import TaskSample, make_task, named_tasks

LENGTHS = (1024, 4096)
SAMPLES = 5


@dataclass(frozen=True)
class SuitePlan:
    """Tasks, lengths and number of samples of a suite.

    Attributes:
        tasks: names of tasks and suites.
        lengths: prompt lengths in tokens.
        samples: number of prompts for each task and length.
        generate: continue greedy decoding after a wrong token, to grade the generated text.
    """

    tasks: tuple[str, ...] = ("ruler",)
    lengths: tuple[int, ...] = LENGTHS
    samples: int = SAMPLES
    generate: bool = True

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


class DenseAnswer(NamedTuple):
    """The dense model's answer to one sample."""

    answer: TaskAnswer
    closed_book: float  # mean log-probability of the correct answer's tokens without the context, nats


@dataclass
class DenseAnswers:
    """Cache of the dense model's answers, so that several policies are compared with one dense run."""

    found: dict[tuple[str, int, int, int], DenseAnswer] = field(default_factory=dict)

    def of(
        self, model: Any, tokenizer: Any, samples: Sequence[TaskSample], seed: int, index: int, generate: bool
    ) -> DenseAnswer:
        """Return the answer to a sample, with some of the other samples' answers as wrong ones."""
        sample = samples[index]
        key = (sample.task, sample.tokens, seed, index)
        if key not in self.found:
            others = other_answers(samples, index)
            answer = answer_task(model, tokenizer, sample, generate=generate, others=others)
            self.found[key] = DenseAnswer(answer, closed_book(model, sample))
        return self.found[key]


def run_suite(
    model: Any,
    tokenizer: Any,
    applied: Callable[[], AbstractContextManager[Any]],
    text: str,
    plan: SuitePlan,
    *,
    limit: float | None = 0.1,
    seed: int = 0,
    dense: DenseAnswers | None = None,
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
        dense: cache of the dense model's answers.
        say: callback with the completed share of the work and a note.
        remember: function that stores the figures of a task and a length by name.
    """
    haystack, dense = Haystack(text), DenseAnswers() if dense is None else dense
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
            answer = partial(_answers, model, tokenizer, applied, made, plan, seed, dense)
            rows.append(judged(task, tokens, **remember(f"{task} at {tokens} tokens", answer), limit=limit))
            say(1 / plan.rows, f"{task}, {tokens:,} tokens: {rows[-1].verdict}")
    return SuiteResult(tuple(rows), limit, seed, tuple(skipped))


def _answers(
    model: Any,
    tokenizer: Any,
    applied: Callable[[], AbstractContextManager[Any]],
    made: Sequence[TaskSample],
    plan: SuitePlan,
    seed: int,
    dense: DenseAnswers,
) -> dict[str, Any]:
    """Return the figures that `judged` takes, as plain data."""
    before = [dense.of(model, tokenizer, made, seed, index, plan.generate) for index in range(len(made))]
    with applied() as handle:
        after = [answer_task(model, tokenizer, sample, generate=plan.generate) for sample in made]
        ran_sparse = handle is None or handle.stats()["sparse_calls"] > 0
    return {
        "dense": [(each.answer.logprob, each.answer.match) for each in before],
        "sparse": [(each.logprob, each.match) for each in after],
        "known": [each.closed_book for each in before],
        "others": [each.answer.others for each in before],
        "ran_sparse": ran_sparse,
    }
