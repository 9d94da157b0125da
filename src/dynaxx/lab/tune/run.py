# SPDX-License-Identifier: Apache-2.0
"""Find the sparsest policy that keeps a model's perplexity, and write it down with its evidence.

Three ideas: a gradient tells what each head loses at each budget (`sensitivity`); one density is shared among all heads
so that the predicted loss is least (`allocation`); and the real perplexity on text that was not used for either decides
how low that density may go, from 50 % down. The best uniform budget is found the same way, to compare with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynaxx.lab.progress import Progress
from dynaxx.lab.tune.decode import check_cuda_graph
from dynaxx.lab.tune.result import TuneResult
from dynaxx.lab.tune.search import Search, calibration_ids

__all__ = ["calibration_ids", "default_block_size", "tune"]


def tune(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    out: Path,
    tolerance: float = 0.01,
    tokens: int = 4096,
    time_budget: float | None = None,
    block_size: int | None = None,
    seed: int = 0,
    resume: bool = True,
    with_decode: bool = False,
    cuda_graph: bool = False,
    with_reference: bool = True,
    progress: Progress | None = None,
    command: str = "dynaxx tune",
    name: str = "",
) -> TuneResult:
    """Tune a policy for `model` on `text`; write `tuning.json` and `policy.json` to `out`.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's.
        text: sample of the workload. Only its calibration part (`texts.split_text`) is used.
        out: folder for the results.
        tolerance: allowed relative rise of perplexity; 0.01 is 1 %.
        tokens: length of the texts.
        block_size: block size of the policy; `default_block_size` if None.
        seed: draws the tokens whose gradients are taken, and the places of texts.
        time_budget: seconds after which no further evaluation starts; the best found so far is written.
        with_decode: also look for decode rules, written if they keep perplexity and are faster on this machine.
        cuda_graph: time decoding as a captured CUDA graph, as engines run it, instead of single launches; a GPU only.
        with_reference: also record attention statistics under the policy, against which drift is measured, and set a
            `guard` that counts.
        resume: go on from `out/tuning_state.json` if model, text and settings are the same.
        progress: is told of each step.
        command: command to keep as evidence.
        name: name of the model in the result.

    Raises:
        ValueError: too little text, or settings out of range.
        UnsupportedInputError: a model that `dynaxx.apply` cannot serve.
    """
    check_cuda_graph(model, with_decode, cuda_graph)
    if not 0 < tolerance < 1:
        raise ValueError(f"`tolerance` must be between 0 and 1 (0.01 is 1 %), got {tolerance}")
    block_size = block_size or default_block_size(model)
    search = Search(model, tokenizer, text, out, tokens, block_size, seed, resume, progress, time_budget, tolerance)
    return search.run(command, name or type(model).__name__, text if with_reference else "", with_decode, cuda_graph)


def default_block_size(model: Any) -> int:
    """Return 32 tokens on a CPU, where fine blocks cost nothing and choose better; 64 on a GPU."""
    return 32 if next(model.parameters()).device.type == "cpu" else 64
