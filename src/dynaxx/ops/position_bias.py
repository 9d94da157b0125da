# SPDX-License-Identifier: Apache-2.0
"""Biases by position for `sparse_attention`: `Alibi`, which backends get as slopes, and `T5Bias`, as a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, typed
from dynaxx.layout import BlockLayout, PackedLayout


@typed
@dataclass(frozen=True, eq=False)
class Alibi:
    """Subtract a slope times the distance of query and key from each score (Press et al. 2022; MPT, BLOOM).

    As in FlashAttention, the last query has the position of the last key, and keys after the query count by their
    distance too.

    Attributes:
        slopes: (q_heads,) or (batch, q_heads), floating point. Gradients flow to slopes that require them.
    """

    slopes: Tensor

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the slopes, (batch or 1, q_heads)."""
        slopes = _checked("slopes", self.slopes, (1, 2), "(q_heads,) or (batch, q_heads)").to(dtype)
        return slopes if slopes.ndim == 2 else slopes[None]


@typed
@dataclass(frozen=True, eq=False)
class T5Bias:
    """Add a learned number per bucket of distances and q head to each score (Raffel et al. 2020; T5, UMT5, Pop2Piano).

    Half of the buckets (of each direction) are for single distances. The others grow with the logarithm of the distance
    up to `max_distance`. T5 itself attends with `scale=1.0`.

    Attributes:
        table: (num_buckets, q_heads), floating point: `relative_attention_bias.weight`. Gradients flow to it.
        bidirectional: whether keys after the query have own buckets, as in encoders; else they share that of 0.
        max_distance: distance from which on all keys share a bucket.
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        """Convert `max_distance` to int, whose powers do not overflow."""
        object.__setattr__(self, "max_distance", as_integer("max_distance", self.max_distance))

    def by_distance(self, ahead: Tensor) -> Tensor:
        """Return the bias (1, q_heads, len(ahead)) of keys that many positions after the query."""
        table = _checked("table", self.table, (2,), "(num_buckets, q_heads)")
        buckets = len(table) // 2 if self.bidirectional else len(table)
        if buckets < 2 or self.max_distance <= buckets // 2:
            raise ValueError(
                f"`table` must have 2 buckets per direction, and `max_distance` exceed half of them, got {len(table)} "
                f"buckets and {self.max_distance}"
            )
        distance = ahead.abs() if self.bidirectional else (-ahead).clamp(min=0)
        starts = torch.tensor(_bucket_starts(buckets, self.max_distance), dtype=ahead.dtype, device=ahead.device)
        bucket = torch.bucketize(distance, starts, right=True)
        if self.bidirectional:
            bucket = bucket + buckets * (ahead > 0)
        return table.to(ahead.dtype)[bucket].T.contiguous()[None]  # a kernel that had to copy it is not replayed


PositionBias = Alibi | T5Bias


def _bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distance of each bucket after the first, in whole numbers, so that no logarithm rounds.

    With s single distances and r = buckets - s, bucket s + t begins at s (max_distance / s) ** (t / r), rounded up.
    """
    single = buckets // 2
    rest, starts = buckets - single, list(range(1, single + 1))
    for t in range(1, rest):
        least = max_distance**t * single ** (rest - t)
        start = int(single * (max_distance / single) ** (t / rest)) - 1
        while start**rest < least:
            start += 1
        starts.append(start)
    return starts


def _checked(name: str, x: Tensor, ranks: tuple[int, ...], shape: str) -> Tensor:
    """Return the numbers of a bias if they have the right type and rank."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"`{name}` must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim not in ranks:
        raise ValueError(f"`{name}` must be {shape}, got shape {tuple(x.shape)}")
    return x


def bias_by_distance(position_bias: PositionBias | None, q: Tensor, k: Tensor, layout: BlockLayout) -> Tensor | None:
    """Return the bias of a call as backends read it, see `kernels.bias`: fp32, fp64 for fp64.

    None if there is no bias, or no pair of a query and a key.

    Raises:
        TypeError, ValueError: the bias does not fit q, or packed sequences have more keys than queries.
    """
    if position_bias is None or q.ndim != 4 or k.ndim != 4:  # other ranks are refused with the other inputs
        return None
    if not isinstance(position_bias, PositionBias):
        raise TypeError(f"`position_bias` must be dx.Alibi or dx.T5Bias, got {type(position_bias).__name__}")
    given = position_bias.slopes if isinstance(position_bias, Alibi) else position_bias.table
    if isinstance(given, Tensor) and given.device != q.device:
        raise ValueError(f"`position_bias` must be on q's device {q.device}, got {given.device}")
    if isinstance(layout, PackedLayout) and layout.cu_seqlens_q is not layout.cu_seqlens_k:
        raise ValueError(
            "`position_bias` of packed sequences needs as many keys as queries in each; attend to sequences with other "
            "numbers of keys one by one"
        )
    (batch, seqlen_q, q_heads, _), seqlen_k = q.shape, k.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if isinstance(position_bias, Alibi):
        bias = position_bias.numbers(dtype)
    else:
        ahead = torch.arange(seqlen_q - 1, -max(seqlen_k, 1), -1, dtype=dtype, device=q.device)
        bias = position_bias.by_distance(ahead)
    if bias.shape[1] != q_heads or bias.shape[0] not in (1, batch):
        raise ValueError(
            f"`position_bias` must be for {q_heads} q heads and, if it differs by batch entry, batch {batch}, got "
            f"{bias.shape[1]} heads and batch {bias.shape[0]}"
        )
    return bias.expand(batch, *bias.shape[1:]) if seqlen_q and seqlen_k else None
