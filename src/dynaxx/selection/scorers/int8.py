# SPDX-License-Identifier: Apache-2.0
"""One query per row of q blocks against every key, both in 8 bits: the definition of `MeanQuery(precision="int8")`.

Vectors become whole numbers from -127 to 127 times a step: one step per query and one per kv block, whose keys have a
center taken off, which no softmax notices. Products are exact. The exponential of a product is read off its bits
(Schraudolph 1999): times a whole number, plus the exponent's bias, it is the bits of a float, 2 to the power wanted but
for the fraction, which is taken linearly and so at most 6 % too large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 127.0
ONE = float(1 << 23)  # a power of two more, in the bits of a float
RANGE = 246  # powers of two below a block's best key; what is less, or than half as many, counts as that
STEEPEST = 128 * ONE  # of a score: 128 powers of two from one product to the next
NOTHING = -(1 << 30)  # less than any product
SMALLEST = 1e-30  # what counts as nothing: its inverse is finite
SAMPLES = 1024  # keys that place the center


class EightBits(NamedTuple):
    """Vectors as whole numbers times a step."""

    levels: Tensor  # (..., T, D) int8
    steps: Tensor  # (...) fp32: what one level is worth


def quantised(x: Tensor, factor: float = 1.0) -> EightBits:
    """(..., T, D) fp32 in 8 bits, one step for T vectors, times `factor`."""
    largest = x.abs().amax((-2, -1)).clamp_(min=SMALLEST)
    per_step = torch.full_like(largest, LEVELS) / largest  # one rounding; a number / a tensor takes two
    levels = (x * per_step[..., None, None]).round_()
    return EightBits(levels.to(torch.int8), largest * (factor / LEVELS))


def center_of(k: Tensor) -> Tensor:
    """(B, N, Hk, D) -> (B, Hk, D) fp32: the mean of about `SAMPLES` keys of each head, at even distances."""
    return k[:, :: max(1, k.shape[1] // SAMPLES)].float().mean(1)


def int8_sums(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Log of what kv blocks get from queries, both rounded to 8 bits.

    Args:
        queries: (B, Hq, R, D) fp32, times the softmax scale.
        keys: (B, Hk, n, kv_block, D) fp32, beside their center.
        hidden: (r, n, kv_block) bool, keys that the first r queries must not see.

    Returns:
        (B, Hq, R, n) fp32, -inf where all of a block is hidden.
    """
    (batch, heads, rows, _), kv_heads = queries.shape, keys.shape[1]
    q8, k8 = quantised(queries[..., None, :], ONE / math.log(2)), quantised(keys)
    levels, steps = (x.unflatten(1, (kv_heads, -1)).flatten(2, 3) for x in q8)  # (B, Hk, G R, ...)
    bits = _products(levels.squeeze(-2), k8.levels.flatten(2, 3)).unflatten(-1, keys.shape[2:4])
    bits.unflatten(2, (-1, rows))[:, :, :, : len(hidden)].masked_fill_(hidden, NOTHING)
    best = bits.amax(-1)  # (B, Hk, G R, n)
    slope = (steps[..., None] * k8.steps[:, :, None]).clamp_(max=STEEPEST).round_().clamp_(min=1.0)
    least = best - (torch.full_like(best, RANGE << 23) >> slope.frexp().exponent)
    base = ((RANGE + 1) << 23) - best * slope.int()  # wraps, as the product below does
    bits.clamp_(min=least[..., None]).mul_(slope.int()[..., None]).add_(base[..., None])
    found = bits.view(torch.float32).sum(-1).log2_().add_(slope.mul_(best).div_(ONE).sub_(RANGE - 126))
    found.masked_fill_(best == NOTHING, -torch.inf)  # elsewhere what is hidden is nothing beside the best, in fp32
    return found.mul_(math.log(2)).view(batch, heads, rows, -1)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, Hk, M, D) x (B, Hk, N, D) int8 -> (B, Hk, M, N) int32."""
    if queries.shape[-1] == 1:  # torch._int_mm writes nothing then, on a CPU
        return queries.int() * keys.int().mT
    out = torch.empty(*queries.shape[:3], keys.shape[2], dtype=torch.int32, device=queries.device)
    for q, k, o in zip(queries.flatten(0, 1), keys.flatten(0, 1), out.flatten(0, 1), strict=True):
        torch._int_mm(q, k.T, out=o)
    return out
