# SPDX-License-Identifier: Apache-2.0
"""The base class of scorers, and sums and products with bounded memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from dynaxx.kernels.registry import SELECTION
from dynaxx.kernels.selection.contract import SelectionKernels, SelectionProblem
from dynaxx.layout import BlockGrid
from dynaxx.settings import Configured, Range

MEMORY_BUDGET = 64 << 20  # default in bytes
GPU_MEMORY_BUDGET = 1 << 30  # default on a GPU, where many small steps cost more than memory

ScoreRows = Callable[[int, int], Tensor]  # (first row, last row + 1) -> (B, Hq, R, C) fp32 logits
Sharpness = Annotated[float, Range(0.0, above=True, stored=1000, tries=(0.5, 0.75, 0.9, 1.0))]  # factor on the scores
Reduce = Callable[[Tensor, int], Tensor]  # (fp32 tensor, dim) -> without that dim
_KERNELS: dict[Reduce, str] = {torch.mean: "mean", torch.amin: "smallest", torch.amax: "largest"}  # their GPU names


class MeanQueryTiles(NamedTuple):
    """Scores that are masses of single keys, for the mean queries of tiles."""

    size: int  # tokens per tile, a divisor of the q block
    sharpness: float  # factor on the scores


class Scorer(Configured, ABC):
    """A rule that scores blocks.

    A scorer returns logits whose softmax over the visible kv blocks estimates the share of attention mass. It returns
    a few rows of q blocks at a time, so that neither a seqlen_q x seqlen_k matrix nor all pairs of blocks are held.
    """

    @abstractmethod
    def prepare(
        self, q: Tensor, k: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        """Summarize q and k, and return a function that scores some rows of q blocks. The caller applies causality.

        Args:
            q: (B, seqlen_q, Hq, D).
            k: (B, seqlen_k, Hk, D).
            grid: lengths and block sizes.
            scale: softmax scale.
            memory_budget: bytes of temporary memory, besides q, k and a dozen fp32 numbers per score. The summaries of
                all keys and one row of scores cannot be split and may exceed it.
        """

    def mean_query_tiles(self, q_block: int) -> MeanQueryTiles | None:
        """Return the tiles of a q block whose mean queries the scorer multiplies with single keys; None if others."""
        return None

    @property
    def reads_places(self) -> bool:
        """Return whether `prepare_in_place` is implemented, which scores keys that stay in the pages of a cache."""
        return False

    def prepare_in_place(
        self, q: Tensor, k: Tensor, places: Tensor, grid: BlockGrid, scale: float, *, memory_budget: int = MEMORY_BUDGET
    ) -> ScoreRows:
        """Do what `prepare` does for keys whose block i is block places[i] of k; see `layout.paging.SequenceKeys`."""
        raise NotImplementedError(f"{self!r} needs the keys of a sequence in order")


def pieces(total: int, bytes_each: int, memory_budget: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of pieces of `total` items that fit the budget, at least `multiple` items each."""
    step = max(1, memory_budget // max(1, bytes_each * multiple)) * multiple
    for first in range(0, total, step):
        yield first, min(total, first + step)


def per_kv_head(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply each kv head with its group of q heads: (B, Hq, M, E) @ (B, Hk, E, T) -> (B, Hq, M, T)."""
    batch, q_heads, count, width = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, kv_heads, q_heads // kv_heads * count, width)
    return (grouped @ keys).view(batch, q_heads, count, keys.shape[-1])


def reduce_blocks(x: Tensor, size: int, reduce: Reduce, memory_budget: int) -> Tensor:
    """Reduce every `size` tokens, the last group over the remainder: (B, N, H, D) -> (B, H, ceil(N / size), D) fp32."""
    kernels = scoring_kernels(x)
    if reduce in _KERNELS and kernels is not None:
        return kernels.pool_blocks(x, size, _KERNELS[reduce])
    batch, tokens, heads, dim = x.shape
    whole = tokens // size
    out = torch.empty(batch, heads, -(-tokens // size), dim, device=x.device, dtype=torch.float32)
    for first, last in pieces(whole, 8 * batch * heads * dim * size, memory_budget):
        some = x[:, first * size : last * size].unflatten(1, (-1, size)).float()
        out[:, :, first:last] = reduce(some, 2).transpose(1, 2)
    if tokens % size:
        out[:, :, whole:] = reduce(x[:, None, whole * size :].float(), 2).transpose(1, 2)
    return out


def scoring_kernels(x: Tensor) -> SelectionKernels | None:
    """Return the kernels that score blocks on the device of `x`, or None if torch does."""
    return _scoring_kernels(x.device)


@lru_cache(maxsize=16)
def _scoring_kernels(device: torch.device) -> SelectionKernels | None:
    return None if SELECTION.reasons("triton", SelectionProblem(device)) else SELECTION.kernels("triton")


def pooled(x: Tensor, size: int, memory_budget: int = MEMORY_BUDGET) -> Tensor:
    """Return fp32 means of every `size` tokens: (B, N, H, D) -> (B, H, ceil(N / size), D)."""
    if size == 1:
        return x.float().transpose(1, 2)
    return reduce_blocks(x, size, torch.mean, memory_budget)


def sum_groups(x: Tensor, size: int, dim: int) -> Tensor:
    """Sum every `size` neighbours along `dim` (negative), the last group over the remainder."""
    if size == 1:
        return x
    missing = -x.shape[dim] % size
    x = torch.nn.functional.pad(x, (0, 0) * (-1 - dim) + (0, missing)) if missing else x
    return x.unflatten(dim, (-1, size)).sum(dim)


def log_share(mass: Tensor) -> Tensor:
    """Return the logits of an estimated mass, in place. They are finite, so that a budget may choose empty blocks."""
    return mass.clamp_(min=torch.finfo(mass.dtype).tiny).log_()


def divisor_at_most(size: int, most: int) -> int:
    """Return the largest divisor of `size` that is at most `most` (>= 1)."""
    return next(part for part in range(min(size, most), 0, -1) if size % part == 0)
