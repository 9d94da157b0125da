# SPDX-License-Identifier: Apache-2.0
"""Measure a model with and without a policy: distributions, answers, generated text, time."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.integrations.transformers.apply_policy import apply, full_attention_layers
from dynaxx.integrations.transformers.decoder import cache_of, with_cache
from dynaxx.lab.kinds import digest_of, label, text_of
from dynaxx.lab.perplexity import ROWS, check_finite, logits_of, perplexity, token_losses
from dynaxx.lab.prefill_speed import time_prefill
from dynaxx.lab.resume import Steps, T
from dynaxx.lab.tasks.result import SuiteResult
from dynaxx.lab.tasks.run import SuitePlan, run_suite
from dynaxx.lab.tasks.score import answer_task
from dynaxx.lab.texts import float64, with_start
from dynaxx.lab.time_budget import PASS, TimeBudget
from dynaxx.lab.validate.noise import Noise, measure_noise
from dynaxx.lab.validate.result import KindRow, LogitErrors, Perplexities, Repetition, SpeedRow, TaskScore
from dynaxx.lab.validate.tasks import TASKS
from dynaxx.policy import Policy, resolve

WINDOWS = 3  # stretches of held-out text
PROMPTS, NEW_TOKENS = 3, 64  # generated text
NGRAM = 4
PAIR = 2  # passes of a timed pair
GENERATING = 15  # passes over the prompt that generated text takes about as long as


class TextFigures(NamedTuple):
    """Held-out text, dense and under the policy."""

    logits: LogitErrors
    perplexity: Perplexities
    density: float  # of the layouts, including dense layers
    layer_calls: dict[str, Any]  # counts, as in `Handle.stats`
    first: list[float] = []  # dense loss of each token of the first stretch  # noqa: RUF012
    stretches: list[float] = []  # mean dense loss of each stretch  # noqa: RUF012


class _Stretch(NamedTuple):
    """A stretch of text, dense and under the policy."""

    dense: list[float]  # loss of each token
    sparse: list[float]
    errors: list[float]  # max error, mean error, top-1 agreement, kl
    density: float
    calls: dict[str, Any]


class Comparison:
    """The measurements, dense and sparse. Each step advances `task` by `share` percent.

    What `steps` holds is not measured again.

    Attributes:
        skipped: what was left out for lack of time.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        task: Any,
        start: Sequence[int] = (),
        time: TimeBudget | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.time, self.steps = time or TimeBudget(), steps or Steps(None)
        self.skipped: list[str] = []
        self.model = model
        self.policy = policy
        self.task = task
        self.start = start  # tokens that begin each text

    def has_time(self, what: str, passes: float, tokens: int, step: str = "") -> bool:
        """Return whether so many passes over texts of this length fit; if not, note what is skipped.

        A stored step, named `step` or like what it measures, takes no time.
        """
        stored = _named(step or what, tokens) in self.steps
        fits = stored or self.time.allows(passes * self.time.expects(PASS, tokens))
        self.skipped += [] if fits else [what]
        return fits

    def _remember(self, kind: type[T], what: str, tokens: int, run: Callable[[], T]) -> T:
        """Return the stored result of a step on texts of this length, or compute and store it."""
        return self.steps.remember_as(kind, _named(what, tokens), run)

    @contextlib.contextmanager
    def applied(self) -> Iterator[Any]:
        """Apply the policy to the model."""
        with apply(self.model, self.policy) as handle:
            yield handle

    def stretches(self, ids: list[int], tokens: int, most: int) -> list[Tensor]:
        """Return stretches of a text (1, tokens), from end to end, that begin as the tokenizer begins a text."""
        count = max(1, min(most, len(ids) // tokens))
        stride = (len(ids) - tokens) // max(1, count - 1)
        parts = [ids[index * stride :][:tokens] for index in range(count)]
        return [with_start(torch.tensor([part], dtype=torch.int64, device="cpu"), self.start) for part in parts]

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden states (1, tokens, hidden_size) of ids (1, tokens)."""
        with self.time.work(PASS, ids.shape[1]):
            out: Tensor = self.model.base_model(ids.to(self.model.device), use_cache=False)[0]
        check_finite(out, "hidden states")
        return out

    def text(self, ids: list[int], window: int, share: float) -> TextFigures:
        """Compare logits and loss on stretches of text, dense and sparse."""
        found, calls = list[_Stretch](), dict[str, Any]()
        count = len(stretches := self.stretches(ids, window, WINDOWS))
        for index, some in enumerate(stretches):
            name = f"held-out text {index + 1} of {count}"
            rest = f"stretches {index + 1} to {count} of held-out text"
            if index and not self.has_time(rest, 2, window, name):
                break
            run = partial(self._stretch, some, name, share / count / 2)
            found.append(self._remember(_Stretch, name, window, run))
            calls = _added(calls, found[-1].calls)
        if not calls["sparse_calls"] and has_sparse_rule(self.policy):
            raise ValueError(f"no layer ran sparse, so nothing can be validated: {calls['dense_calls']}")
        losses_dense, losses_sparse, errors = (float64([each[i] for each in found]) for i in range(3))
        change = losses_sparse - losses_dense
        logits = LogitErrors(
            max_error=float(errors[:, 0].amax()),
            mean_error=float(errors[:, 1].mean()),
            top1_agreement=float(errors[:, 2].mean()),
            kl=float(errors[:, 3].mean()),
        )
        perplexities = Perplexities(
            dense=perplexity(losses_dense),
            sparse=perplexity(losses_sparse),
            ratio=float(change.mean().exp()),
            ratio_second_half=float(change[:, change.shape[1] // 2 :].mean().exp()),
            loss_dense=float(losses_dense.mean()),
            loss_sparse=float(losses_sparse.mean()),
            tokens=losses_dense.numel(),
        )
        first, means = losses_dense[0].tolist(), losses_dense.mean(1).tolist()
        density = statistics.mean(each.density for each in found)
        return TextFigures(logits, perplexities, density, calls, first, means)

    def _stretch(self, ids: Tensor, name: str, share: float) -> _Stretch:
        self.task.advance(0, f"{name}: dense")
        dense = self.hidden(ids)[:, :-1]  # of the whole stretch, as in the tuner's trials
        self.task.advance(share, f"{name}: sparse")
        seen: list[float] = []
        with self.applied() as handle, handle.watch(lambda _, layout: seen.append(layout.density())):
            sparse = self.hidden(ids)[:, :-1]
        self.task.advance(share)
        full = len(full_attention_layers(self.model))
        losses, after, errors = (each.tolist() for each in _compare_rows(self.model, dense, sparse, ids))
        return _Stretch(losses, after, errors, (sum(seen) + full - len(seen)) / full, handle.stats())

    def kinds(self, kinds: Sequence[tuple[str, Tensor]], share: float) -> tuple[KindRow, ...]:
        """Compare the loss on one stretch of each kind of text, (1, tokens) ids by name."""
        rows = []
        for kind, ids in kinds:
            if not self.has_time(label(kind), 2, ids.shape[1]):
                continue
            self.task.advance(0, f"{label(kind)}: dense and sparse")
            row = self._remember(KindRow, label(kind), ids.shape[1], partial(self._kind, kind, ids))
            rows.append(row)
            self.task.advance(share / len(kinds), f"{label(kind)}: perplexity {row.ratio - 1:+.2%}")
        return tuple(rows)

    def _kind(self, kind: str, ids: Tensor) -> KindRow:
        dense = token_losses(self.model, ids)[0].double()
        with self.applied():
            change = token_losses(self.model, ids)[0].double() - dense
        ratio, error = float(change.mean().exp()), float(change.std() / change.numel() ** 0.5)
        known = digest_of(text_of(kind))
        return KindRow(kind, label(kind), change.numel(), known, perplexity(dense), ratio, error)

    def noise(self, ids: list[int], text: TextFigures) -> Noise | None:
        """Measure the dense model's own differences on the first stretch of text."""
        tokens = len(text.first) + 1
        what = "the dense model's own noise"
        if not self.has_time(what, 1, tokens):
            return None
        self.task.advance(0, what)
        dense = float64(text.first)
        given = (self.model, self.stretches(ids, tokens, 1)[0], dense, text.stretches)
        return self._remember(Noise, what, tokens, partial(measure_noise, *given))

    def suite(self, tokenizer: Any, text: str, plan: SuitePlan, seed: int, share: float) -> SuiteResult:
        """Run long-context tasks dense and sparse."""
        limit = self.policy.tolerances.task_logprob_drop
        say = lambda part, note: self.task.advance(part * share, note)
        given = (self.model, tokenizer, self.applied, text, plan)
        return run_suite(*given, limit=limit, seed=seed, say=say, remember=self.steps.remember)

    def retrieval(self, samples: Sequence[Any], tokens: int, share: float) -> tuple[TaskScore, ...]:
        """Score every task with prompts of so many tokens, dense and sparse."""
        what, run = "retrieval tasks", partial(self._retrieval, samples, share)
        if not self.has_time(what, 2 * len(samples), tokens):
            return ()
        return self._remember(tuple[TaskScore, ...], what, tokens, run)

    def _retrieval(self, samples: Sequence[Any], share: float) -> tuple[TaskScore, ...]:
        scores: dict[str, list[tuple[float, float, float, float]]] = {}
        for sample in samples:
            self.task.advance(0, f"retrieval: {sample.task}")
            dense = answer_task(self.model, None, sample, generate=False)
            with self.applied():
                sparse = answer_task(self.model, None, sample, generate=False)
            found = (dense.logprob, dense.match, sparse.logprob, sparse.match)
            scores.setdefault(sample.task, []).append(found)
            self.task.advance(share / len(samples))
        rows = []
        for task in TASKS:
            dense_logprob, dense_accuracy, sparse_logprob, sparse_accuracy = (
                statistics.mean(column) for column in zip(*scores[task], strict=True)
            )
            drop, error = _mean_and_error([each[0] - each[2] for each in scores[task]])
            rows.append(TaskScore(task, dense_accuracy, sparse_accuracy, dense_logprob, sparse_logprob, drop, error))
        return tuple(rows)

    def repetition(self, ids: list[int], prompt_tokens: int, share: float) -> Repetition | None:
        """Generate greedy continuations of held-out text, dense and sparse."""
        what, run = "generated text", partial(self._repetition, ids, prompt_tokens, share)
        if not self.has_time(what, GENERATING, prompt_tokens):
            return None
        return self._remember(Repetition, what, prompt_tokens, run)

    def _repetition(self, ids: list[int], prompt_tokens: int, share: float) -> Repetition:
        prompts = torch.cat(self.stretches(ids, prompt_tokens, PROMPTS))
        self.task.advance(0, "generating: dense")
        dense = self._generate(prompts)
        self.task.advance(share / 2, "generating: sparse")
        with self.applied():
            sparse = self._generate(prompts)
        self.task.advance(share / 2)
        pairs = list(zip(map(repeated, dense), map(repeated, sparse), strict=True))
        increase, error = _mean_and_error([after - before for before, after in pairs])
        same = statistics.mean(a == b for rows in zip(dense, sparse, strict=True) for a, b in zip(*rows, strict=True))
        before, after = (statistics.mean(column) for column in zip(*pairs, strict=True))
        return Repetition(before, after, increase, error, same)

    @torch.no_grad()
    def _generate(self, prompts: Tensor) -> list[list[int]]:
        """Generate greedily, also past an end-of-text token, to measure repetition over equal lengths."""
        fed, cache, made = prompts.to(self.model.device), None, []
        for _ in range(NEW_TOKENS):
            out = self.model.base_model(fed, use_cache=True, **with_cache(self.model.base_model, cache))
            cache = cache_of(out)
            fed = logits_of(self.model, out[0][:, -1:]).argmax(-1)
            made.append(fed)
        rows: list[list[int]] = torch.cat(made, dim=1).tolist()
        return rows

    def speed(self, ids: list[int], lengths: Sequence[int], share: float) -> tuple[SpeedRow, ...]:
        """Time dense and sparse prefill in turns at each length, the longest that fit first.

        The shortest one, where a policy gains least, keeps its share of the time.
        """
        rows, limit = list[SpeedRow](), self.policy.tolerances.slowdown or 1.0
        for seqlen in sorted(lengths, reverse=True):
            what, shorter = f"the speed at {seqlen:,} tokens", {min(lengths)} - {seqlen}
            step = what if self.time.seconds is None else f"{what} within {self.time.seconds} s"  # maybe in few pairs
            with self.time.reserving(partial(self.speed_seconds, shorter)):
                if not self.has_time(what, PAIR, seqlen, step):
                    continue
                self.task.advance(0, f"prefill of {seqlen:,} tokens: time and memory")
                prompt = torch.tensor([ids[:seqlen]], dtype=torch.int64, device="cpu")
                run = partial(time_prefill, self.model, prompt, self.applied, limit, self.time)
                rows.append(self._remember(SpeedRow, step, seqlen, run))
            self.task.advance(share * seqlen / sum(lengths))
        return tuple(sorted(rows, key=lambda row: row.seqlen))

    def speed_seconds(self, lengths: Iterable[int]) -> float:
        """Return the expected seconds of one pair of prefills at each length."""
        return sum(PAIR * self.time.expects(PASS, seqlen) for seqlen in lengths)


def _named(what: str, tokens: int) -> str:
    return f"{what}, {tokens} tokens"


@torch.no_grad()
def _compare_rows(model: Any, dense: Tensor, sparse: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare logits a few rows at a time.

    Returns:
        Dense loss and sparse loss of each token, (tokens,) each, and (max error, mean error, top-1 agreement, kl).
    """
    labels = ids[0, 1:].to(dense.device)
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    worst, sums = 0.0, torch.zeros(3, dtype=torch.float64, device="cpu")
    for start in range(0, dense.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        a, b = (logits_of(model, hidden[0, rows]) for hidden in (dense, sparse))
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        for into, logprobs in zip(losses, (p, q), strict=True):
            into.append(-logprobs.gather(1, labels[rows, None])[:, 0].cpu())
        difference = (a - b).abs()
        worst = max(worst, float(difference.amax()))
        agree = (a.argmax(-1) == b.argmax(-1)).double().sum()
        kl = (p.exp() * (p - q)).sum(-1).double().sum()
        sums += torch.stack([difference.mean(-1).double().sum(), agree, kl]).cpu()
    mean = (sums / dense.shape[1]).tolist()
    return torch.cat(losses[0]), torch.cat(losses[1]), torch.tensor([worst, *mean], dtype=torch.float32, device="cpu")


def repeated(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Return the share of n-grams that occurred before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def has_sparse_rule(policy: Policy) -> bool:
    """Return whether a policy has any sparse prefill rule."""
    return bool(resolve(policy))


def _added(total: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Add two results of `Handle.stats`."""
    merged: dict[str, Any] = {kind: total.get(kind, 0) + more[kind] for kind in ("sparse_calls", "own_pattern_calls")}
    for kind in ("dense_calls", "dense_sequences"):
        merged[kind] = dict(Counter(total.get(kind, {})) + Counter(more[kind]))
    return merged


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is 0 for a single value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error
