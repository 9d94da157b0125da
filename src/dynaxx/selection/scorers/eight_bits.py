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

from dynaxx.layout import BlockGrid
from dynaxx.selection.scorers.base import pieces

LEVELS = 127.0
ONE = float(1 << 23)  # a power of two more, in the bits of a float
RANGE = 246  # powers of two below a block's best key; what is less, or than half as many, counts as that
STEEPEST = 128 * ONE  # of a score: 128 powers of two from one product to the next
NOTHING = -(1 << 30)  # less than any product
SMALLEST = 1e-30  # what counts as nothing: its inverse is finite
SAMPLES = 1024  # keys that place the center
PIECE_BYTES = 4 << 20  # of products at a time: what a core's cache holds


class EightBits(NamedTuple):
    """Vectors as whole numbers times a step."""

    levels: Tensor  # (..., T, D) int8
    steps: Tensor  # (...) fp32: what one level is worth


def quantised(x: Tensor, factor: float = 1.0) -> EightBits:
    """(..., T, D) fp32 in 8 bits, one step for T vectors, times `factor`."""
    largest = x.abs().amax((-2, -1)).clamp_(min=SMALLEST)
    levels = (x * (LEVELS / largest)[..., None, None]).round_()
    return EightBits(levels.to(torch.int8), largest / LEVELS * factor)


def center_of(k: Tensor) -> Tensor:
    """(B, N, Hk, D) -> (B, Hk, D) fp32: the mean of about `SAMPLES` keys of each head, at even distances."""
    return k[:, :: max(1, k.shape[1] // SAMPLES)].float().mean(1)


def int8_scores_by_torch(
    queries: Tensor, k: Tensor, center: Tensor, start: int, grid: BlockGrid, memory_budget: int
) -> Tensor:
    """Log of what each kv block gets from the rows' queries, but for a number per row.

    Args:
        queries: (B, Hq, R, D) fp32, one of each row of q blocks from `start`, times the softmax scale.
        k: (B, seqlen_k, Hk, D).
        center: (B, Hk, D), taken off all keys.
        memory_budget: bytes to hold.

    Returns:
        (B, Hq, R, C) fp32; a row sees keys up to its last query's; -inf where it sees none of a block.
    """
    (batch, heads, rows, dim), (q_block, kv_block), kv_heads = queries.shape, grid.block_size, k.shape[2]
    scores = queries.new_full((batch, heads, rows, grid.kv_blocks), -torch.inf)
    ends = torch.full((rows,), grid.seqlen_k, device=k.device)  # past the last key that each row sees
    if grid.causal:
        ends = (torch.arange(start + 1, start + rows + 1, device=k.device) * q_block + grid.offset).clamp(
            max=grid.seqlen_k
        )
    q8 = quantised(queries[..., None, :], ONE / math.log(2))
    position = torch.arange(grid.kv_blocks * kv_block, device=k.device)
    block_bytes = batch * kv_block * (12 * kv_heads * dim + 8 * heads * rows)
    for first, last in pieces(grid.kv_blocks, block_bytes, min(memory_budget, PIECE_BYTES)):
        begin, stop = first * kv_block, last * kv_block
        above, inside = (
            int((ends <= edge).sum()) for edge in (begin, stop - 1)
        )  # rows that see nothing, not all of it
        if above == rows:
            break
        keys = (k[:, begin:stop].float() - center[:, None]).transpose(1, 2)
        if keys.shape[2] < stop - begin:
            keys = torch.nn.functional.pad(keys, (0, 0, 0, stop - begin - keys.shape[2]))
        k8 = quantised(keys.unflatten(2, (-1, kv_block)))
        levels, steps = (x[:, :, above:].unflatten(1, (kv_heads, -1)).flatten(2, 3) for x in q8)  # (B, Hk, G R, ...)
        bits = _products(levels.squeeze(-2), k8.levels.flatten(2, 3)).unflatten(-1, (-1, kv_block))
        by_head = bits.unflatten(2, (-1, rows - above))[:, :, :, : inside - above]
        hidden = (position[begin:stop] >= ends[above:inside, None]).unflatten(-1, (-1, kv_block))
        by_head.masked_fill_(hidden, NOTHING)
        best = bits.amax(-1)  # (B, Hk, G R, blocks)
        slope = (steps[..., None] * k8.steps[:, :, None]).round_().clamp_(1.0, STEEPEST)
        least = best - (torch.full_like(best, RANGE << 23) >> slope.frexp().exponent)
        base = int((RANGE + 1) * ONE) - best * slope.int()  # wraps, as the product below does
        bits.clamp_(min=least[..., None]).mul_(slope.int()[..., None]).add_(base[..., None])
        found = bits.view(torch.float32).sum(-1).log2_().add_(slope.mul_(best).div_(ONE).sub_(RANGE - 126))
        found.masked_fill_(best == NOTHING, -torch.inf)  # elsewhere what is hidden is nothing beside the best, in fp32
        scores[:, :, above:, first:last] = found.mul_(math.log(2)).view(batch, heads, rows - above, -1)
    return scores


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, Hk, M, D) x (B, Hk, N, D) int8 -> (B, Hk, M, N) int32."""
    out = torch.empty(*queries.shape[:3], keys.shape[2], dtype=torch.int32, device=queries.device)
    for q, k, o in zip(queries.flatten(0, 1), keys.flatten(0, 1), out.flatten(0, 1), strict=True):
        torch._int_mm(q, k.T, out=o)
    return out
