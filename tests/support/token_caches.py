# SPDX-License-Identifier: Apache-2.0
"""Random caches of a decoding step, and random choices of their tokens."""

import torch

import dynaxx as dx
from dynaxx.trained.testing.nsa import random_choices
from dynaxx.trained.tokens.spans import TokenSpans

BATCH, LENGTH = 3, 128


def choice(rng, seqlen_q, heads, count, size):
    spans = TokenSpans((0, BATCH * seqlen_q), (0, LENGTH), size)
    return random_choices(rng, spans, heads, count).unflatten(0, (BATCH, seqlen_q))


def random_cache(rng, kv_heads, dims, dtype):
    k, v = (torch.randn(BATCH, LENGTH, kv_heads, width) for width in dims)
    used = torch.tensor([LENGTH, rng.randint(1, LENGTH), 0 if rng.random() < 0.3 else 40], dtype=torch.int32)
    pad = torch.tensor([0, rng.randint(0, 9), 0], dtype=torch.int32) if rng.random() < 0.4 else None
    if dtype in (torch.int8, torch.float8_e4m3fn):
        return dx.PagedCache.quantized(k, v, dtype, page_size=32, seqused_k=used, leftpad_k=pad, sinks=3, window=20)
    k, v = k.to(dtype), v.to(dtype)
    if rng.random() < 0.4:
        return dx.PagedCache.contiguous(k, v, page_size=16, seqused_k=used, leftpad_k=pad)
    place = torch.randperm(BATCH * LENGTH // 16)
    table = place.view(BATCH, -1).to(torch.int32)
    paged = [torch.empty_like(x.unflatten(1, (-1, 16)).flatten(0, 1)) for x in (k, v)]
    for store, x in zip(paged, (k, v), strict=True):
        store[place] = x.unflatten(1, (-1, 16)).flatten(0, 1)
    if rng.random() < 0.5:
        table[0, 2] = -1
    return dx.PagedCache(*paged, used, table, leftpad_k=pad)
