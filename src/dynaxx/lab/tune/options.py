# SPDX-License-Identifier: Apache-2.0
"""`TuneOptions`: what `tune` searches, what must hold, how much it measures, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynaxx.lab.tune.costs import DEFAULT_SCORERS

BlockSize = int | tuple[int, int]


@dataclass(frozen=True)
class TuneOptions:
    """The options of `tune`. Its command, `dynaxx tune`, has one option for each.

    Raises:
        ValueError: an option is out of range.
    """

    name: str  # name of the model in the results
    out: Path  # folder for the results

    # These must hold.
    tolerance: float = 0.01  # allowed relative rise of perplexity; 0.01 is 1 %
    kinds: tuple[str, ...] = ()  # kinds of text (`kinds.KINDS`, or "all") that must hold beside the sample
    hold: tuple[str, ...] = ()  # tasks (`tasks.suite`) that may lose 0.1 nats per answer token, and count in the costs
    held_out: bool = False  # also tune on all kinds except one, for each kind, and measure the excluded kind

    # These are searched.
    block_size: BlockSize | None = None  # or (q_block, kv_block); None takes the device's default
    scorers: tuple[str, ...] = DEFAULT_SCORERS  # scorers of blocks (`costs.SCORERS`); the one that loses least is taken
    decode: bool = False  # also search decode rules, which are written if they preserve perplexity and are faster here
    cuda_graph: bool = False  # time decoding as a captured CUDA graph, as engines run it; GPU only
    page_size: int | None = None  # tokens per page of decode rules, 8 to 128; None takes the kv block
    reference: bool = True  # record attention statistics as the baseline for drift, and set a `guard` that counts

    # How much is measured
    tokens: int = 4096  # tokens per stretch of text
    cost_tokens: int | None = None  # tokens of a stretch to measure costs on, or fewer under a time budget; None: all
    stretches: int = 1  # stretches of each text for costs of heads; up to three times as many, where needed, for trials
    seed: int = 0  # of the sampled tokens of the gradient, and of the places of texts
    time_budget: float | None = None  # seconds after which no further evaluation starts; the best result is written
    resume: bool = True  # continue from `out/tuning_state.jsonl` if model, text and settings are the same

    # Where, and as what
    search_on: str | None = None  # device for the search, such as "cuda" for a model on a CPU; None: the model's
    command: str = "dynaxx tune"  # the command that produces these results, stored as evidence

    def __post_init__(self) -> None:
        """Refuse options that no model could serve."""
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"`tolerance` must be from 0 to below 1 (0.01 is 1 %), got {self.tolerance}")
