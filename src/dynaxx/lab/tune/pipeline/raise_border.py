# SPDX-License-Identifier: Apache-2.0
"""Validate a tuned policy, and raise its border if only speed fails.

`tune` derives its border from attention alone. In the whole model, other launches surround attention, so the border may
be higher if attention takes little of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune.crossover import HYSTERESIS
from dynaxx.lab.tune.result import Raised, TuneResult
from dynaxx.lab.validate.result import ValidationResult
from dynaxx.policy import Evidence

SHORT = 1024  # tokens of the texts under a time budget, at least; retrieval tasks need some room


def validate_tuned(
    model: Any,
    tokenizer: Any,
    tuned: TuneResult,
    text: str,
    *,
    out: Path,
    say: Callable[[str], object] = lambda line: None,
    time: TimeBudget | None = None,
    **options: Any,
) -> tuple[TuneResult, ValidationResult]:
    """Validate the policy in `out`. While only speed fails, raise its border to the next length and repeat.

    Args:
        model: the model that was tuned.
        tokenizer: the tokenizer of the model.
        tuned: the result of `tune`.
        text: sample text; only its held-out part is used.
        out: the folder that `tune` wrote to.
        say: a function that reports each raise.
        time: the time budget; under a limit, texts are hardly longer than those that were tuned on.
        **options: options of `validate`; its `state` keeps what does not change with the border. Texts are at least as
            long as those that were tuned on.

    Returns:
        The tuned result with its final border, and the validation of that policy.

    Raises:
        ValueError: see `validate`.
        PolicyError: see `validate`.
        UnsupportedInputError: see `validate`.
    """
    from dynaxx.lab.validate.run import TOKENS, validate

    def validated(tuned: TuneResult) -> ValidationResult:
        limited = time is not None and time.seconds is not None
        tokens = max(SHORT if limited else TOKENS, tuned.tokens, tuned.policy.border + 1)
        return validate(model, tokenizer, tuned.policy, text, tokens=tokens, time=time, **options)

    found = validated(tuned)
    while (border := found.later_border(timing.seqlen for timing in tuned.crossover)) is not None:
        if border > tuned.tokens:  # the policy was not tuned there
            break
        later = with_border(tuned, border, found)
        say(f"validate: slower than dense at {later.raised[-1].seqlen:,} tokens, so sparse from {border:,}")
        try:
            found = validated(later)
        except ValueError:  # the text is too short for longer prompts
            break
        tuned = later.write(out)
    return tuned, found


def with_border(tuned: TuneResult, border: int, found: ValidationResult) -> TuneResult:
    """Return the result with a policy that runs prompts sparse from `border` tokens, with `found` as evidence."""
    slow = max(found.slow(), key=lambda row: row.seqlen)
    raised = Raised(tuned.policy.border, border, slow.seqlen, slow.dense_seconds, slow.sparse_seconds)
    evidence = Evidence(
        what="validation on the held-out part of the text: the whole prefill was slower than dense",
        command=tuned.command,
        values={"tokens": slow.seqlen, "dense_seconds": slow.dense_seconds, "sparse_seconds": slow.sparse_seconds},
    )
    policy = tuned.policy.replace(
        dense_below=max(slow.seqlen + 1, int(border / HYSTERESIS)),
        sparse_from=border,
        evidence=(*tuned.policy.evidence, evidence),
    )
    return dataclasses.replace(tuned, policy=policy, raised=(*tuned.raised, raised))
