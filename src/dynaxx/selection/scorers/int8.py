# SPDX-License-Identifier: Apache-2.0
"""Score one query per row of q blocks against every key, both in 8 bits. Defines `MeanQuery(precision="int8")`.

A vector becomes whole numbers from -127 to 127 times a step, with one step per query and one per kv block. A center is
subtracted from all keys first, which does not change the softmax. The products are exact. Their exponentials use
Schraudolph's method (1999): a product times a whole number plus the exponent's bias, read as the bits of a float, is
the wanted power of two, except that its fraction is interpolated linearly and thus at most 6 % too large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 127.0
ONE = float(1 << 23)  # the step between powers of two, in the bits of a float
RANGE = 246  # smallest power of two below a block's best key; smaller values are clamped to it
STEEPEST = 128 * ONE  # largest slope of a score: 128 powers of two per unit of the product
NOTHING = -(1 << 30)  # less than any product
SMALLEST = 1e-30  # smallest step; its inverse is finite
SAMPLES = 1024  # number of keys that determine the center


class EightBits(NamedTuple):
    """Vectors as whole numbers times a step."""

    levels: Tensor  # (..., T, D) int8
    steps: Tensor  # (...) fp32, the value of one level


def quantised(x: Tensor, factor: float = 1.0) -> EightBits:
    """Quantize (..., T, D) fp32 times `factor` to 8 bits, with one step per T vectors."""
    largest = x.abs().amax((-2, -1)).clamp_(min=SMALLEST)
    per_step = torch.full_like(largest, LEVELS) / largest  # rounds once; scalar / tensor rounds twice
    levels = (x * per_step[..., None, None]).round_()
    return EightBits(levels.to(torch.int8), largest * (factor / LEVELS))


def center_of(k: Tensor) -> Tensor:
    """Return the mean of about `SAMPLES` evenly spaced keys per head: (B, N, Hk, D) -> (B, Hk, D) fp32."""
    return k[:, :: max(1, k.shape[1] // SAMPLES)].float().mean(1)


def int8_sums(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Return the log of each kv block's summed exponentials, from queries and keys rounded to 8 bits.

    Args:
        queries: (B, Hq, R, D) fp32, times the softmax scale.
        keys: (B, Hk, n, kv_block, D) fp32, with their center subtracted.
        hidden: (r, n, kv_block) bool, keys that the first r queries must not see.

    Returns:
        (B, Hq, R, n) fp32, -inf for blocks that are hidden entirely.
    """
    (batch, heads, rows, _), kv_heads = queries.shape, keys.shape[1]
    q8, k8 = quantised(queries[..., None, :], ONE / math.log(2)), quantised(keys)
    levels, steps = (x.unflatten(1, (kv_heads, -1)).flatten(2, 3) for x in q8)  # (B, Hk, G R, ...)
    bits = _products(levels.squeeze(-2), k8.levels.flatten(2, 3)).unflatten(-1, keys.shape[2:4])
    bits.unflatten(2, (-1, rows))[:, :, :, : len(hidden)].masked_fill_(hidden, NOTHING)
    best = bits.amax(-1)  # (B, Hk, G R, n)
    slope = (steps[..., None] * k8.steps[:, :, None]).clamp_(max=STEEPEST).round_().clamp_(min=1.0)
    least = best - (torch.full_like(best, RANGE << 23) >> slope.frexp().exponent)
    base = ((RANGE + 1) << 23) - best * slope.int()  # wraps around like the product below
    bits.clamp_(min=least[..., None]).mul_(slope.int()[..., None]).add_(base[..., None])
    found = bits.view(torch.float32).sum(-1).log2_().add_(slope.mul_(best).div_(ONE).sub_(RANGE - 126))
    found.masked_fill_(best == NOTHING, -torch.inf)  # other hidden keys vanish beside the best key in fp32
    return found.mul_(math.log(2)).view(batch, heads, rows, -1)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return exact products: (B, Hk, M, D) x (B, Hk, N, D) int8 -> (B, Hk, M, N) int32."""
    if queries.shape[-1] == 1:  # torch._int_mm leaves its output unwritten in this case, on a CPU
        return queries.int() * keys.int().mT
    out = torch.empty(*queries.shape[:3], keys.shape[2], dtype=torch.int32, device=queries.device)
    for q, k, o in zip(queries.flatten(0, 1), keys.flatten(0, 1), out.flatten(0, 1), strict=True):
        torch._int_mm(q, k.T, out=o)
    return out
