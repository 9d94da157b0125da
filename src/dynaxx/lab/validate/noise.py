# SPDX-License-Identifier: Apache-2.0
"""Measure how much the dense model's perplexity varies between texts and by rounding, to compare limits with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.perplexity import token_losses
from dynaxx.lab.texts import float64


@dataclass(frozen=True)
class Noise:
    """Relative changes of the dense model's perplexity without any policy."""

    rounding: float  # when the weights are rounded to bfloat16, the usual data type of engines
    rounding_error: float  # standard error of that change
    stretches: float | None  # standard deviation between the stretches of text over their mean; None for a single one

    def summary(self) -> str:
        """Return one sentence."""
        between = (
            "" if self.stretches is None else f", and differs by {self.stretches:.0%} between stretches of the text"
        )
        return (
            f"for scale: dense perplexity changes by {self.rounding:+.2%} (standard error {self.rounding_error:.2%}) "
            f"with weights rounded to bfloat16{between}"
        )


def measure_noise(model: Any, ids: Tensor, dense: Tensor, stretches: list[float]) -> Noise:
    """Measure the dense model's noise with one more pass over one text.

    Args:
        model: a causal language model of transformers, dense.
        ids: (1, N) the text.
        dense: (N - 1,) the loss of its tokens.
        stretches: mean loss of every stretch of text.
    """
    with _rounded(model):
        change = (token_losses(model, ids)[0].cpu() - dense.cpu()).double()
    means = float64(stretches).exp()
    return Noise(
        rounding=float(change.mean().exp()) - 1,
        rounding_error=float(change.std() / change.numel() ** 0.5),
        stretches=float(means.std() / means.mean()) if len(stretches) > 1 else None,
    )


@contextmanager
def _rounded(model: Any) -> Iterator[None]:
    """Round the weights to bfloat16 within the block without changing the data type of computation.

    The original weights are stored and restored exactly. Weights with no more than 16 bits do not change.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dtype in (torch.float32, torch.float64):
                    kept.append((parameter, parameter.clone()))
                    parameter.copy_(parameter.to(torch.bfloat16))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in kept:
                parameter.copy_(original)
