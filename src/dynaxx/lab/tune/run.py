# SPDX-License-Identifier: Apache-2.0
"""Find the sparsest policy that preserves a model's perplexity, and write it with its evidence.

The method has three steps. A gradient estimates the loss of each head at each budget (`sensitivity`). One density is
distributed among all heads so that the predicted loss is smallest (`allocation`). The real perplexity on other text
then decides how low the density may be, starting at 50 %. The best uniform budget is found in the same way, for
comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaxx.lab.kinds import kinds_of, text_of
from dynaxx.lab.progress import Progress
from dynaxx.lab.tune.costs import DEFAULT_SCORERS
from dynaxx.lab.tune.decode import check_decode
from dynaxx.lab.tune.result import TuneResult
from dynaxx.lab.tune.search import Search

__all__ = ["default_block_size", "tune"]


def tune(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    out: Path,
    tolerance: float = 0.01,
    tokens: int = 4096,
    time_budget: float | None = None,
    block_size: int | tuple[int, int] | None = None,
    seed: int = 0,
    resume: bool = True,
    with_decode: bool = False,
    cuda_graph: bool = False,
    with_reference: bool = True,
    kinds: Sequence[str] = (),
    hold: Sequence[str] = (),
    held_out: bool = False,
    choosing: int = 0,
    scorers: Sequence[str] = DEFAULT_SCORERS,
    stretches: int = 1,
    search_on: str | None = None,
    page_size: int | None = None,
    progress: Progress | None = None,
    command: str = "dynaxx tune",
    name: str = "",
) -> TuneResult:
    """Tune a policy for `model` on `text`; write `tuning.json` and `policy.json` to `out`.

    Args:
        model: a causal language model of transformers.
        tokenizer: the tokenizer of the model.
        text: a sample of the workload. Only its calibration part (`texts.split_text`) is used.
        out: folder for the results.
        tolerance: allowed relative rise of perplexity; 0.01 is 1 %.
        tokens: length of the texts.
        block_size: block size of the policy, or (q_block, kv_block); `default_block_size` if None.
        seed: seed for the sampled tokens of the gradient, and for the places of texts.
        time_budget: seconds after which no further evaluation starts; the best result so far is written.
        with_decode: also search decode rules. They are written if they preserve perplexity and are faster here.
        cuda_graph: time decoding as a captured CUDA graph, as engines run it, instead of single launches. GPU only.
        with_reference: also record attention statistics under the policy as the baseline for drift, and set a `guard`
            that counts.
        kinds: kinds of text (`kinds.KINDS`, or "all") to tune on in addition to `text`; each must stay within the
            tolerance.
        hold: tasks (`tasks.suite`) that may lose at most 0.1 nats per answer token on average.
        held_out: also tune on all kinds except one, for each kind, and measure the excluded kind.
        choosing: number of layers that choose blocks, while all others read those of an earlier layer; 0 means all. The
            policy shares blocks only if that takes at most 8 % more of them.
        scorers: names of scorers of blocks to try (`costs.SCORERS`); the one that loses least is taken.
        stretches: stretches of each text for the costs of heads, and as many others for the trials. More of them allow
            sparser policies: a trial must pass by two standard errors.
        search_on: device for the search, for example "cuda" for a model on a CPU. Times and the reference are taken
            where the model is. The default is the model's device.
        page_size: tokens per page of decode rules: 8, 16, 32, 64 or 128. Smaller pages need fewer tokens, and take
            longer to choose. The default is `block_size`'s kv_block; engines with pages of their own need theirs.
        resume: continue from `out/tuning_state.json` if model, text and settings are the same.
        progress: reports each step.
        command: the command, stored as evidence.
        name: name of the model in the result.

    Raises:
        ValueError: the text is too short, or a setting is out of range.
        UnsupportedInputError: `dynaxx.apply` cannot serve the model.
    """
    check_decode(model, with_decode, cuda_graph, page_size)
    if not 0 < tolerance < 1:
        raise ValueError(f"`tolerance` must be between 0 and 1 (0.01 is 1 %), got {tolerance}")
    block_size = block_size or default_block_size(model)
    others = {kind: text_of(kind) for kind in kinds_of(kinds) if text_of(kind) != text}
    if choosing < 0:
        raise ValueError(f"`choosing` must be a number of layers, or 0, got {choosing}")
    if held_out and not others:
        raise ValueError("`held_out` needs several kinds of text: give `kinds`, for example --kinds all")
    settings = (out, tokens, block_size, seed, resume, progress, time_budget, tolerance, others, hold, choosing)
    search = Search(model, tokenizer, text, *settings, scorers, stretches, search_on, page_size)
    traffic = text if with_reference else ""
    return search.run(command, name or type(model).__name__, traffic, with_decode, cuda_graph, held_out)


def default_block_size(model: Any) -> int:
    """Return 32 tokens on a CPU, where small blocks cost no time and select better, and 64 on a GPU."""
    return 32 if next(model.parameters()).device.type == "cpu" else 64
