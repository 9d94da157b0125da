# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors in other memory layouts: views with any strides, surrounded by NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _among(x: Tensor, dim: int, before: int, after: int, step: int = 1) -> Tensor:
    """Copy x into a slice along `dim` of a larger tensor of NaN."""
    shape = list(x.shape)
    shape[dim] = before + step * shape[dim] + after
    view = x.new_full(shape, torch.nan).narrow(dim, before, step * x.shape[dim])
    view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view.copy_(x)


def _order(x: Tensor, *dims: int) -> Tensor:
    """Copy x to memory with its dimensions in the order `dims`, outermost first."""
    return x.permute(dims).contiguous().permute([dims.index(dim) for dim in range(x.ndim)])


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "heads outside": lambda x: _order(x, 0, 2, 1, 3),
    "batch inside": lambda x: _order(x, 1, 2, 0, 3),
    "head_dim outside": lambda x: _order(x, 3, 0, 1, 2),
    "among other heads": lambda x: _among(x, 2, 1, 2),
    "part of head_dim": lambda x: _among(x, 3, 3, 5),
    "odd rows": lambda x: _among(x, 3, 0, 1),
    "every second token": lambda x: _among(x, 1, 1, 0, step=2),
    "every second number": lambda x: _among(x, 3, 0, 1, step=2),
    "odd address": lambda x: torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape),
}


def random_memory(rng: random.Random, x: Tensor, kinds: Sequence[str] = tuple(MEMORY)) -> tuple[Tensor, str]:
    """Copy a (batch, seqlen, heads, head_dim) tensor to a random layout of `MEMORY`; return it and its name."""
    name = rng.choice(kinds)
    return MEMORY[name](x), name
