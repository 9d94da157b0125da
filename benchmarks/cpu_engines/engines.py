# SPDX-License-Identifier: Apache-2.0
"""One row of the table: an engine, its attention, its precision, and how to make it ready."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dynaxx.policy import Policy

Precision = Literal["fp32", "bf16", "int8"]
Attention = Literal["dense", "exact", "policy"]  # "exact": every pair, on dynaxx's kernels
Prefill = Callable[[Tensor], Tensor]  # ids (1, seqlen) to the last token's logits (vocabulary,) in fp32


class NotHereError(Exception):
    """An engine cannot run on this machine; the text says why and what to do."""


@dataclass(frozen=True)
class Given:
    """The inputs that engines are made from.

    Attributes:
        models: one per precision of torch's engines; engines share its weights.
        source: the model's GGUF file, None if it has none.
        policy: what sparse rows run by.
        work: a folder for converted models.
        threads: of every engine.
    """

    models: dict[Precision, Any]
    source: Path | None
    policy: Policy
    work: Path
    threads: int

    def model(self, precision: Precision) -> Any:
        """Return a copy of the model that shares its weights, so that engines do not change each other's."""
        model = self.models[precision]
        shared: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, shared)


@dataclass(frozen=True)
class EngineRow:
    """One engine in the table."""

    engine: str
    attention: Attention
    precision: Precision
    make: Callable[[Given], Prefill]  # raises NotHereError
    weights: str = ""  # where they differ from the precision, such as "Q8_0"

    @property
    def name(self) -> str:
        """Return the engine and its attention."""
        return f"{self.engine}, {self.attention}"


def prefill_of(model: Any) -> Prefill:
    """Return the prefill of a transformers model: the cache is filled, and only the last logits are computed."""

    @torch.inference_mode()
    def run(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, use_cache=True, logits_to_keep=1).logits
        return logits[0, -1].float()

    return run
