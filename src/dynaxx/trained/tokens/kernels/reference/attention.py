# SPDX-License-Identifier: Apache-2.0
"""Definition of attention over tokens that each query chooses: softmax attention under a mask of queries x keys.

Sequences are packed. T queries, M keys, Hq / Hk / Hs query, kv and selection heads, n slots, D / E head_dim of q, k
and v. Hs divides Hk, or is a multiple of it; selection head s chooses for the q heads [s * Hq / Hs, (s + 1) * Hq / Hs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.contract import AttentionProblem, SavedForward
from dynaxx.kernels.attention.softmax import masked_attention, masked_gradients
from dynaxx.kernels.decode.reference import _used_keys, read_cache
from dynaxx.layout.paging import PagedCache
from dynaxx.trained.tokens.spans import TokenSpans

latent_backward = None


def unsupported_reasons(problem: AttentionProblem) -> list[str]:
    """Return no reasons: the definition serves everything, in memory of queries x keys."""
    return []


def token_mask(block_indices: Tensor, spans: TokenSpans) -> Tensor:
    """Return (Hs, T, M) bool: keys of the chosen blocks (T, Hs, n), -1 for none, at or before the query."""
    queries, heads, _ = block_indices.shape
    total, size, device = spans.ends_k[-1], spans.block_size, block_indices.device
    position, first = spans.position.to(device), spans.first_key.to(device)
    mask = torch.zeros(queries, heads, total + 1, dtype=torch.bool, device=device)
    key = (block_indices.long() * size)[..., None] + torch.arange(size, device=device)  # (T, Hs, n, size)
    seen = (block_indices >= 0)[..., None] & (key <= position[:, None, None, None])
    mask.scatter_(2, torch.where(seen, key + first[:, None, None, None], total).flatten(2), True)
    return mask[..., :-1].transpose(0, 1)


def prepare(block_indices: Tensor, spans: TokenSpans, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what forward and backward share: the mask."""
    return token_mask(block_indices, spans)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, E) in q's dtype and lse (Hq, T), natural log, in fp32 (fp64 for fp64). Differentiable.

    With a softcap c, a score s becomes c tanh(s / c). sinks (Hq,) join each softmax of their head as the score of one
    more key whose value is zero. A query that sees nothing gives out = 0, lse = -inf (its sink) and zero gradients.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    wide_k, wide_v = (x.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    visible = plan.repeat_interleave(q.shape[1] // plan.shape[0], 0)
    out, lse = masked_attention(q[None], wide_k[None], wide_v[None], visible[None], scale, softcap, sinks)
    return out[0], lse[0]


def backward(
    do: Tensor, dlse: Tensor, saved: SavedForward, plan: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv."""
    visible = plan.repeat_interleave(saved.q.shape[1] // plan.shape[0], 0)
    as_batch = SavedForward(*(x[None] for x in saved))
    dq, dk, dv, _ = masked_gradients(do[None], dlse[None], as_batch, visible, scale, softcap)
    return dq[0], dk[0], dv[0]


def attend_tokens(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N) of a decoding step over chosen tokens of a cache.

    Query i of batch entry b stands at position seqused_k[b] - N + i. It sees the keys of block_indices (B, N, Hs, n),
    blocks of `block_size` tokens, from leftpad_k[b] up to that position, in pages that exist.
    """
    seqlen_q, q_heads = q.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = read_cache(cache, dtype)
    length = k.shape[1]
    key = (block_indices.long() * block_size)[..., None] + torch.arange(block_size, device=q.device)
    key = torch.where((block_indices >= 0)[..., None] & (key < length), key, length).flatten(3)
    chosen = torch.zeros(*block_indices.shape[:3], length + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter_(3, key, True)[..., :-1].transpose(1, 2)  # (B, Hs, N, M)
    position = torch.arange(length, device=q.device)
    query = cache.seqused_k[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device)
    visible = chosen & (_used_keys(cache)[:, None] & (position <= query[..., None]))[:, None]
    if cache.exact is not None:
        k, v = _with_exact_values(cache, k, v)
    group = q_heads // cache.kv_heads
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    visible = visible.repeat_interleave(q_heads // visible.shape[1], 1)
    return masked_attention(q, k, v, visible, scale, softcap, sinks)


def _with_exact_values(cache: PagedCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with the exact tokens in their places."""
    assert cache.exact is not None, "asked before"
    position = cache.exact.positions(cache.seqused_k, cache.leftpad_k).long()  # (B, slots), -1 for none
    where = torch.where(position < 0, k.shape[1], position)[..., None, None]
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))
    place = lambda x, own: pad(x).scatter(1, where.expand_as(own), own.to(x.dtype))[:, :-1]
    return place(k, cache.exact.k), place(v, cache.exact.v)
