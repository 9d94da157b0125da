# SPDX-License-Identifier: Apache-2.0
"""Attention for requests of mixed length: group requests by length, with one pattern or selector per group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.layout.host import never_traced
from dynaxx.ops.attention import sparse_attention
from dynaxx.patterns import Pattern
from dynaxx.selection import Hybrid, Selector, select_blocks


class Bucket(NamedTuple):
    """Requests up to a given length, and the rule that decides where they attend.

    Attributes:
        max_seqlen: largest number of keys; None: no limit.
        rule: a pattern, a selector or a hybrid of both.
    """

    max_seqlen: int | None
    rule: Pattern | Selector | Hybrid


class Request(NamedTuple):
    """One sequence, whose queries are aligned to its last keys.

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
    """Return for each bucket the indices of its requests, in order. A request goes to the first bucket that fits it.

    Args:
        lengths: number of keys of each request.
        buckets: buckets with increasing limits; a limit of None comes last.

    Raises:
        ValueError: limits do not increase, or a length exceeds the last limit.
    """
    limits = [float("inf") if bucket.max_seqlen is None else bucket.max_seqlen for bucket in buckets]
    if not limits or any(b <= a for a, b in pairwise(limits)):
        raise ValueError(f"`buckets` must have increasing limits, None last, got {[b.max_seqlen for b in buckets]}")
    members: list[list[int]] = [[] for _ in buckets]
    for request, length in enumerate(lengths):
        if length > limits[-1]:
            raise ValueError(f"request {request} has {length} keys, the last bucket allows {buckets[-1].max_seqlen}")
        members[next(i for i, limit in enumerate(limits) if length <= limit)].append(request)
    return members


@never_traced
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
    """Attend for requests of mixed length, each with the rule of its bucket. Exact over the pairs that the rule shows.

    Requests of one bucket with equal lengths are stacked into a batch, so no block straddles two requests. Use
    `packed_layout` if the tokens are already packed.

    Args:
        requests: one `Request` or (q, k, v) per sequence, with equal heads and dtype.
        buckets: increasing limits, e.g. `[Bucket(1024, Causal()), Bucket(None, SlidingWindow(512) | TopK(0.1))]`.
        causal: hide keys after the query.
        block_size: tokens per block, one number or (q_block, kv_block).
        scale: softmax scale, default head_dim ** -0.5.
        softcap: see `sparse_attention`; ignored by the scores that select blocks.
        sinks: see `sparse_attention`; ignored by the scores that select blocks.
        backend: see `sparse_attention`.

    Returns:
        out (seqlen_q, q_heads, head_dim_v) of each request, in order. Differentiable.

    Raises:
        ValueError: a request is not (seqlen, heads, head_dim), or is longer than every bucket allows.
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
