# SPDX-License-Identifier: Apache-2.0
"""`dynaxx validate`: compare a model under a policy with the dense model, by the policy's tolerances.

Everything is measured on held-out text and tasks, dense and sparse in one process: next-token distributions,
perplexity, retrieval, repetition in generated text, and time and memory of the whole prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.about import policy_digest
from dynaxx.lab.kinds import kinds_of, label, text_of
from dynaxx.lab.machine import machine_facts
from dynaxx.lab.models import longest_prompt
from dynaxx.lab.perplexity import evaluating, fast_linears
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.lab.resume import Steps, fingerprint
from dynaxx.lab.tasks.haystack import Haystack
from dynaxx.lab.tasks.run import SuitePlan
from dynaxx.lab.texts import encode, ids_of, split_text, start_of, started
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune.crossover import within
from dynaxx.lab.tune.evidence import RATIO_ON
from dynaxx.lab.validate.comparison import Comparison, has_sparse_rule
from dynaxx.lab.validate.result import TaskScore, ValidationResult, checks_of
from dynaxx.lab.validate.tasks import make_samples
from dynaxx.policy import Policy

TOKENS = 4096  # tokens of each stretch of held-out text, if the policy's border, the model and the text allow
TASK_TOKENS = 2048
TASK_SAMPLES = 3  # samples per task
PROMPT_TOKENS = 1024  # prompt tokens before generated text
LENGTHS = (512, 2048, 8192)  # lengths for time and memory, if the policy, the model and the text allow


def validate(
    model: Any,
    tokenizer: Any,
    policy: Policy,
    text: str,
    *,
    lengths: Sequence[int] | None = None,
    tokens: int | None = None,
    kinds: Sequence[str] = (),
    suite: SuitePlan | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    time: TimeBudget | None = None,
    state: Path | None = None,
) -> ValidationResult:
    """Compare a model under a policy with the dense model.

    Args:
        model: a causal language model of transformers without a policy.
        tokenizer: the tokenizer of the model.
        policy: the policy to validate.
        text: sample text; only its held-out part (`split_text`) is used.
        lengths: prompt lengths for time and memory. The default is 512, 2,048 and 8,192, limited by the model and the
            text. The policy's border is added, and lengths that it runs dense are left out.
        tokens: length of the stretches of text for quality. The default is 4,096 or the policy's border, limited by
            the text.
        kinds: other kinds of text (`kinds.KINDS`, or "all") whose perplexity must meet the same limit.
        suite: long-context tasks to run instead of the three short retrieval tasks.
        seed: seed of the tasks.
        progress: reports each step.
        time: the time budget. One stretch of text is always compared; what does not fit is left out, and named.
        state: file that keeps each finished measurement. A stopped run continues from it, and so does a validation of
            the same rules with another border, where both run the same blocks.

    Raises:
        ValueError: the text is too short, or the policy has no sparse rule or is dense at all possible lengths, so that
            nothing can be validated.
        PolicyError: see `dynaxx.apply`.
        UnsupportedInputError: see `dynaxx.apply`.
    """
    progress, time = progress or SilentProgress(), time or TimeBudget()
    setup = _Setup(model, tokenizer, policy, text, lengths, tokens, kinds, suite, seed)
    ids = setup.ids
    steps = Steps(state, "" if state is None else _key(model, policy, setup, suite))
    with evaluating(model), progress.task("Validating", 100) as task:
        run = Comparison(model, policy, task, start_of(tokenizer), time, steps)
        with run.applied():  # refuse a policy for another model before long work
            pass
        to_time = [each for each in setup.lengths if each <= setup.window]
        with fast_linears(model), time.reserving(lambda: run.speed_seconds(to_time)):
            of_text = run.text(ids, setup.window, share=35)
            rows = run.kinds(setup.kinds, share=0)
            noise = run.noise(ids, of_text)
            tasks: tuple[TaskScore, ...] = ()
            answered = None
            if suite is not None:
                answered = run.suite(tokenizer, setup.held_out, suite, seed, share=20)
            else:
                tasks = run.retrieval(setup.samples, setup.task_tokens, share=20)
            repetition = run.repetition(ids, max(setup.border, min(setup.window, PROMPT_TOKENS)), share=15)
        speed = run.speed(ids, setup.lengths, share=30)
    perplexity = of_text.perplexity
    checks = checks_of(policy.tolerances, of_text.logits, perplexity, tasks, repetition, speed, rows, answered)
    return ValidationResult(
        passed=all(check.passed for check in checks),
        checks=checks,
        logits=of_text.logits,
        perplexity=perplexity,
        tasks=tasks,
        repetition=repetition,
        speed=speed,
        density=of_text.density,
        layer_calls=of_text.layer_calls,
        windows=perplexity.tokens // max(1, setup.window - 1),
        window_tokens=setup.window,
        seed=seed,
        sparse_from=setup.border if setup.sparse else None,
        kinds=rows,
        suite=answered,
        noise=noise,
        tuned_kinds=_tuned_kinds(policy),
        skipped=tuple(run.skipped),
    )


def _key(model: Any, policy: Policy, setup: _Setup, suite: SuitePlan | None) -> str:
    """Return an identity of what is measured, whose steps name their lengths, and of the machine that measures it."""
    rules = policy_digest(policy.replace(dense_below=0, sparse_from=None))
    settings = dict(policy=rules, seed=setup.seed, suite=suite and (suite, setup.border))
    on = dict(machine=machine_facts(), device=model.device)
    return fingerprint(model, torch.tensor(setup.ids, dtype=torch.int64, device="cpu"), **settings, **on)


class _Setup:
    """The texts and lengths of a validation. The constructor refuses what cannot be measured; see `validate`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: Policy,
        text: str,
        lengths: Sequence[int] | None,
        tokens: int | None,
        kinds: Sequence[str],
        suite: SuitePlan | None,
        seed: int,
    ) -> None:
        self.held_out, self.seed = split_text(text).held_out, seed
        self.ids = ids_of(tokenizer, self.held_out)
        self.sparse, limit = has_sparse_rule(policy), longest_prompt(model)  # whether the policy has a sparse rule
        check_sparse(policy)
        self.border = _border(policy, limit) if self.sparse else 0  # tokens from which it runs sparse
        # Tokens of each stretch of text for quality
        self.window = _window(tokens, self.border + 1 if self.sparse else 0, limit, len(self.ids))
        longest = min(limit, len(self.ids))
        wanted = within(LENGTHS, longest) if lengths is None else lengths
        self.lengths = _lengths(wanted, self.border, longest) if self.sparse else ()  # tokens of the prompts to time
        self.task_tokens = max(self.border, min(self.window, TASK_TOKENS))
        self.samples = [] if suite else make_samples(tokenizer, self.ids, self.task_tokens, TASK_SAMPLES, seed)
        others = [kind for kind in kinds_of(kinds) if text_of(kind) != text]
        self.kinds = [(kind, _stretch(tokenizer, kind, self.window)) for kind in others]  # ids (1, window)
        if suite is not None:
            if max(suite.lengths) > limit:
                most = max(suite.lengths)
                raise ValueError(f"task lengths must be at most the model's limit {limit:,}, got {most:,}")
            Haystack(self.held_out)  # refuse a text that cannot hide facts


def check_sparse(policy: Policy) -> None:
    """Raise ValueError if a policy has no sparse rule, for prompts or for decoding, or no limit to hold it against."""
    if not has_sparse_rule(policy) and not any(rule.phase == "decode" for rule in policy.rules):
        raise ValueError(
            "the policy has no sparse rule, so it runs everything dense and there is nothing to validate; "
            "tune again with more time or a higher tolerance"
        )
    if all(limit is None for _, limit in policy.tolerances):
        raise ValueError("the policy's tolerances are all null, so nothing could fail; set one: `perplexity_ratio`")


def _border(policy: Policy, limit: int) -> int:
    """Return the tokens from which a policy runs sparse, if the model takes so many."""
    border = policy.border
    if border > limit:
        raise ValueError(
            f"the policy is dense below {border:,} tokens and the model's limit is {limit:,}, so it never runs sparse "
            "and cannot be validated; tune again, or lower `dense_below` and `sparse_from`"
        )
    return border


def _window(tokens: int | None, least: int, limit: int, given: int) -> int:
    """Return the length of the stretches of text.

    Args:
        tokens: the requested length.
        least: shortest text that runs sparse, one token more than the border because the last token is only predicted.
        limit: the model's limit.
        given: tokens of the held-out text.
    """
    window = min(tokens or max(TOKENS, least), max(limit, least), given)
    if window < least:
        more = f"the held-out half of the text has {given:,}; give a text of about {2 * least:,} tokens"
        raise ValueError(
            f"the policy is dense below {least - 1:,} tokens, but quality would be measured at {window:,}; "
            + (more if given < least else f"`tokens` must be at least {least:,}")
        )
    return window


def _tuned_kinds(policy: Policy) -> tuple[str, ...]:
    """Return the kinds of text on which a policy's evidence has the perplexity of its tuning."""
    names = [name for each in policy.evidence for name in each.values if name.startswith(RATIO_ON)]
    return tuple(dict.fromkeys(name.removeprefix(RATIO_ON) for name in names if "," not in name))


def _stretch(tokenizer: Any, kind: str, tokens: int) -> Tensor:
    """Return the first tokens of the held-out half of a kind of text."""
    held_out = split_text(text_of(kind)).held_out
    return started(tokenizer, encode(tokenizer, held_out, tokens, part=f"the held-out half of {label(kind)}"))


def _lengths(lengths: Sequence[int], border: int, longest: int) -> tuple[int, ...]:
    """Return the lengths to time: the requested ones that run sparse, and the border, where a policy gains least."""
    wrong = [length for length in lengths if not 1 < length <= longest]
    if wrong:
        raise ValueError(f"`lengths` must be from 2 to {longest:,}, the limit of model and text, got {wrong[0]:,}")
    more = {border} if lengths and 1 < border <= longest else set()
    return tuple(sorted({length for length in lengths if length >= border} | more))
