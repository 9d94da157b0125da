# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune`: find the sparsest policy whose perplexity stays within a tolerance.

`sensitivity` measures the loss of every head at every budget, in one pass over a text. `costs` distributes a
density among the heads. `density` finds the smallest density that passes on texts which the costs have not seen. The
policy is sparse from the length at which it is faster on this machine (`crossover`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynaxx.lab.kinds import kinds_of, text_of
from dynaxx.lab.progress import Progress
from dynaxx.lab.time_budget import TimeBudget
from dynaxx.lab.tune.decode import check_decode
from dynaxx.lab.tune.options import TuneOptions
from dynaxx.lab.tune.result import TuneResult
from dynaxx.lab.tune.search import Search

__all__ = ["TuneOptions", "default_block_size", "tune"]


def tune(
    model: Any,
    tokenizer: Any,
    text: str,
    options: TuneOptions,
    *,
    progress: Progress | None = None,
    time: TimeBudget | None = None,
) -> TuneResult:
    """Tune a policy for `model` on `text`; write `tuning.json` and `policy.json` to `options.out`.

    Args:
        model: a causal language model of transformers.
        tokenizer: the tokenizer of the model.
        text: a sample of the workload. Only its calibration part (`texts.split_text`) is used.
        options: what is searched, what must hold, how much is measured, and where.
        progress: reports each step.
        time: the time budget; by default that of the options, from now on.

    Raises:
        ValueError: the text is too short, or an option is out of range.
        UnsupportedInputError: `dynaxx.apply` cannot serve the model.
    """
    check_decode(model, options.decode, options.cuda_graph, options.page_size)
    others = {kind: text_of(kind) for kind in kinds_of(options.kinds) if text_of(kind) != text}
    if options.held_out and not others:
        raise ValueError("`held_out` needs several kinds of text: give `kinds`, for example --kinds all")
    options = replace(
        options,
        name=options.name or type(model).__name__,
        block_size=options.block_size or default_block_size(model),
    )
    return Search(model, tokenizer, text, others, options, progress, time).run()


def default_block_size(model: Any) -> int:
    """Return 32 tokens on a CPU, where small blocks cost no time and select better, and 64 on a GPU."""
    return 32 if next(model.parameters()).device.type == "cpu" else 64
