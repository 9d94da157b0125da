# SPDX-License-Identifier: Apache-2.0
"""Requests of mixed length: group them by length, and give each group its own pattern."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.ops.attention import sparse_attention
from dynaxx.patterns import Pattern
from dynaxx.selection import Hybrid, Selector, select_blocks


class Bucket(NamedTuple):
    """Requests up to a length, and where these attend.

    Attributes:
        max_seqlen: keys of the longest; None: of any length.
        rule: a pattern, a selector, or both.
    """

    max_seqlen: int | None
    rule: Pattern | Selector | Hybrid


class Request(NamedTuple):
    """One sequence, queries aligned to its last keys.

    Attributes:
        q: (seqlen_q, q_heads, head_dim).
        k: (seqlen_k, kv_heads, head_dim).
        v: (seqlen_k, kv_heads, head_dim_v).
    """

    q: Tensor
    k: Tensor
    v: Tensor


@typed
def bucket_by_length(lengths: Sequence[int], buckets: Sequence[Bucket]) -> list[list[int]]:
    """Return for each bucket the requests that are its own: those it holds and no bucket before it does, in order.

    Args:
        lengths: keys of each request.
        buckets: limits rising, None last.

    Raises:
        ValueError: buckets whose limits do not rise, or a length beyond the last.
    """
    limits = [float("inf") if bucket.max_seqlen is None else bucket.max_seqlen for bucket in buckets]
    if not limits or any(b <= a for a, b in pairwise(limits)):
        raise ValueError(f"`buckets` must have limits that rise, None last, got {[b.max_seqlen for b in buckets]}")
    members: list[list[int]] = [[] for _ in buckets]
    for request, length in enumerate(lengths):
        if length > limits[-1]:
            raise ValueError(f"request {request} has {length} keys, more than any bucket's {buckets[-1].max_seqlen}")
        members[next(i for i, limit in enumerate(limits) if length <= limit)].append(request)
    return members


@typed
def attend_in_buckets(
    requests: Sequence[tuple[Tensor, Tensor, Tensor]],
    buckets: Sequence[Bucket],
    *,
    causal: bool = True,
    block_size: int | tuple[int, int] = 64,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """Attend for requests of mixed length, each by the rule of its bucket. Exact over what the rule shows.

    Requests of one bucket and the same lengths are stacked to one batch, so that no block straddles two of them.
    `packed_layout` serves where tokens already lie packed.

    Args:
        requests: `Request` or (q, k, v) each, of the same heads and dtype.
        buckets: limits rising, for instance `[Bucket(1024, Causal()), Bucket(None, SlidingWindow(512) | TopK(0.1))]`.
        causal, block_size: as `Pattern.layout` and `select_blocks`.
        scale, softcap, sinks, backend: as `sparse_attention`; scores that select blocks are neither capped nor do they
            know of sinks.

    Returns:
        out (seqlen_q, q_heads, head_dim_v) of each request, in their order. Differentiable.

    Raises:
        ValueError: a request that is not (seqlen, heads, head_dim) or is longer than every bucket.
    """
    for number, request in enumerate(requests):
        if any(x.ndim != 3 for x in request):
            raise ValueError(f"request {number} must be (seqlen, heads, head_dim), got {[x.shape for x in request]}")
    outs: list[Tensor | None] = [None] * len(requests)
    for bucket, members in zip(buckets, bucket_by_length([len(r[1]) for r in requests], buckets), strict=True):
        same: dict[tuple[int, int], list[int]] = {}
        for number in members:
            same.setdefault((len(requests[number][0]), len(requests[number][1])), []).append(number)
        for numbers in same.values():
            q, k, v = (torch.stack([requests[number][part] for number in numbers]) for part in range(3))
            layout = select_blocks(q, k, bucket.rule, causal=causal, block_size=block_size, scale=scale)
            out = sparse_attention(q, k, v, layout, scale=scale, softcap=softcap, sinks=sinks, backend=backend)
            for number, own in zip(numbers, out, strict=True):
                outs[number] = own
    return [out for out in outs if out is not None]
