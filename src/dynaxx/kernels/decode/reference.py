# SPDX-License-Identifier: Apache-2.0
"""Reference definition of decoding over a paged cache: selection of pages, and softmax attention over their keys.

Legend: B batch; N queries of a step; Hq, Hk query and kv heads; G q heads per kv head; D head_dim of q and k, E
head_dim of v; P logical pages; S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxx.kernels.attention.softmax import masked_attention
from dynaxx.kernels.decode.contract import DecodeProblem
from dynaxx.layout.host import without_autocast
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.layout.paging.exact_tokens import ExactTokens

select_and_attend = None  # two steps


def unsupported_reasons(problem: DecodeProblem) -> list[str]:
    """Return no reasons: the reference serves every problem. It copies the whole cache; for tests and small inputs."""
    return []


def attend_pages(
    q: Tensor,
    cache: PagedCache,
    block_indices: Tensor | None,
    counts: Tensor | None,
    scale: float,
    softcap: float | None = None,
    left: int | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, N, Hq, E) in q's dtype and lse (B, Hq, N), natural log, in fp32 (fp64 for fp64 queries).

    Query i of batch entry b has position seqused_k[b] - N + i. It sees keys from leftpad_k[b] up to its own position,
    in the pages of block_indices (B, Hk, S), where -1 is empty, or in all pages if that is None. `counts` is what
    `select_pages` returned with the pages, or None for pages in any order. Exact tokens are always visible. Computes in
    fp32 or better. A query that sees nothing has out = 0 and lse = -inf.

    With `left`, a query sees only that many keys before its own. With a softcap c, a score s becomes c tanh(s / c).
    sink_logits (Hq,) are added to the softmax of their head as the score of one more key with value zero.
    """
    group_size = q.shape[2] // cache.kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = read_cache(cache, dtype)
    visible = visible_keys(cache, q.shape[1], block_indices, left)
    if cache.exact is not None:
        k, v, visible = with_exact_tokens(cache, cache.exact, k, v, visible, left)
    k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    visible = visible.repeat_interleave(group_size, dim=1)
    return masked_attention(q, k, v, visible, scale, softcap, sink_logits)


def select_pages(
    q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the pages to read, (B, Hk, slots) int32, ascending, padded with -1, and their number, (B, Hk) int32.

    `selection.pages.PageBudget` defines the rule. With wanted (2, Hk), a head reads row 0 + ceil(row 1 * pages of the
    sequence) pages, in fp32, in addition to sinks and window. The best scores win; for equal scores, the earlier page.
    """
    first, stop = page_range(cache)
    pages = torch.arange(cache.max_pages, device=q.device)
    exists = (pages >= first[:, None]) & (pages < stop[:, None])
    if cache.page_table is not None:
        exists &= cache.page_table >= 0
    leftpad = torch.zeros_like(cache.seqused_k) if cache.leftpad_k is None else cache.leftpad_k
    window_start = cache.seqused_k - (q.shape[1] + window - 1)
    sink = pages * cache.page_size < leftpad[:, None] + sinks if sinks else torch.zeros_like(exists)
    forced = exists & (sink | ((pages + 1) * cache.page_size > window_start[:, None]))
    counts = wanted[0] + (wanted[1] * (stop - first).clamp(min=0)[:, None].float()).ceil()  # (B, Hk)
    scores = page_scores(q, cache, scale).masked_fill(~(exists & ~forced)[:, None], -torch.inf)
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen = (exists & ~forced)[:, None] & (rank < counts[..., None]) | forced[:, None]
    ascending = torch.where(chosen, pages, cache.max_pages).sort(-1).values[..., :slots]
    block_indices = torch.where(ascending < cache.max_pages, ascending, -1).int()
    return block_indices, (block_indices >= 0).sum(-1).int()


@without_autocast
def page_scores(q: Tensor, cache: PagedCache, scale: float) -> Tensor:
    """Return (B, Hk, P) fp32 (fp64 for fp64): max(q, 0) . high + min(q, 0) . low, summed over queries and group."""
    assert cache.summaries is not None, "checked before"
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    low, high = (_by_logical_page(cache, x.to(dtype)) for x in (cache.summaries.low, cache.summaries.high))
    grouped = (q.to(dtype) * scale).unflatten(2, (cache.kv_heads, -1))  # (B, N, Hk, G, D)
    up, down = grouped.clamp(min=0).sum((1, 3)), grouped.clamp(max=0).sum((1, 3))
    scores = torch.einsum("bhd,bphd->bhp", up, high) + torch.einsum("bhd,bphd->bhp", down, low)
    if cache.summaries.scale is None:
        return scores
    return scores * _by_logical_page(cache, cache.summaries.scale.to(dtype)).transpose(1, 2)


def summarize_pages(cache: PagedCache, summaries: PageSummaries, new_tokens: int | None) -> None:
    """Write the summaries of the pages that hold the last `new_tokens` keys of each sequence; None: of all pages.

    A summary covers the keys in use on its page, so earlier contents do not matter. Pages without such a key keep their
    summary. In int8, the largest magnitude of a page's two vectors is 127 times its scale.
    """
    k = read_keys(cache, torch.float32 if cache.k.dtype != torch.float64 else torch.float64)
    used = _used_keys(cache).unflatten(1, (cache.max_pages, cache.page_size))  # (B, P, page_size)
    first, stop = page_range(cache)
    if new_tokens is not None:
        first = torch.maximum(first, (cache.seqused_k - new_tokens).clamp(min=0) // cache.page_size)
    pages = torch.arange(cache.max_pages, device=cache.device)
    touched = (pages >= first[:, None]) & (pages < stop[:, None]) & used.any(-1)
    if cache.page_table is not None:
        touched &= cache.page_table >= 0
    k = k.unflatten(1, (cache.max_pages, cache.page_size))  # (B, P, page_size, Hk, D)
    hidden = ~used[..., None, None]
    mean = k.masked_fill(hidden, 0.0).sum(2) / used.sum(-1).clamp(min=1)[..., None, None]
    low, high = k.masked_fill(hidden, torch.inf).amin(2), k.masked_fill(hidden, -torch.inf).amax(2)
    entry, page = touched.nonzero(as_tuple=True)
    where = (entry, page) if cache.page_table is None else (cache.page_table[entry, page].long(),)
    low, high = ((mean + summaries.bound * (extreme - mean))[entry, page] for extreme in (low, high))
    if summaries.scale is not None:
        scale = torch.maximum(low.abs(), high.abs()).amax(-1).float() / 127
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        summaries.scale[where] = scale
        low, high = ((x / scale[..., None]).round() for x in (low, high))
    summaries.low[where] = low.to(summaries.low.dtype)
    summaries.high[where] = high.to(summaries.high.dtype)


def page_range(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """Return the first logical page with a visible key, and the end of the pages in use, each (B,)."""
    leftpad = torch.zeros_like(cache.seqused_k) if cache.leftpad_k is None else cache.leftpad_k
    return leftpad // cache.page_size, (cache.seqused_k + cache.page_size - 1) // cache.page_size


def visible_keys(cache: PagedCache, seqlen_q: int, block_indices: Tensor | None, left: int | None = None) -> Tensor:
    """Return (B, Hk, N, P * page_size) bool: the keys that each query of a kv head's group sees."""
    position = torch.arange(cache.max_pages * cache.page_size, device=cache.device)
    query = cache.seqused_k[:, None] - seqlen_q + torch.arange(seqlen_q, device=cache.device)  # (B, N)
    visible = (_used_keys(cache)[:, None] & _in_reach(position, query, left))[:, None]
    if block_indices is None:
        return visible.expand(-1, cache.kv_heads, -1, -1)
    batch, heads, _ = block_indices.shape
    kept = torch.zeros(batch, heads, cache.max_pages + 1, dtype=torch.bool, device=cache.device)
    kept.scatter_(2, torch.where(block_indices < 0, cache.max_pages, block_indices).long(), True)
    return visible & kept[..., :-1].repeat_interleave(cache.page_size, 2)[:, :, None]


def _in_reach(position: Tensor, query: Tensor, left: int | None) -> Tensor:
    """Return whether queries at positions (B, N) see keys at positions (M,) or (B, 1, M), as (B, N, M) bool."""
    reached = position <= query[..., None]
    return reached if left is None else reached & (position >= query[..., None] - left)


def with_exact_tokens(
    cache: PagedCache, exact: ExactTokens, k: Tensor, v: Tensor, visible: Tensor, left: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return k, v and `visible_keys` with exact tokens appended; their 8-bit copies in the cache are hidden."""
    position = torch.arange(k.shape[1], device=k.device)
    start, stop = exact.bounds(cache.seqused_k, cache.leftpad_k)
    elsewhere = (position < start[:, None]) | (position >= stop[:, None])  # (B, P * page_size)
    own = exact.positions(cache.seqused_k, cache.leftpad_k)  # (B, slots)
    seqlen_q = visible.shape[2]
    query = cache.seqused_k[:, None] - seqlen_q + torch.arange(seqlen_q, device=k.device)
    seen = (own >= 0)[:, None] & _in_reach(own[:, None], query, left)  # (B, N, slots)
    seen = seen[:, None].expand(-1, visible.shape[1], -1, -1)
    visible = torch.cat([visible & ~elsewhere[:, None, None], seen], -1)
    return torch.cat([k, exact.k.to(k.dtype)], 1), torch.cat([v, exact.v.to(v.dtype)], 1), visible


def read_cache(cache: PagedCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return k (B, P * page_size, Hk, D) and v (.., E) by logical position, dequantized; 0 in unused positions."""
    hidden = ~_used_keys(cache)[..., None, None]
    v = _by_position(cache, cache.v, cache.v_scale, dtype).masked_fill(hidden, 0.0)
    return read_keys(cache, dtype).masked_fill(hidden, 0.0), v


def read_keys(cache: PagedCache, dtype: torch.dtype) -> Tensor:
    """Return k of `read_cache`, with arbitrary contents in unused positions."""
    return _by_position(cache, cache.k, cache.k_scale, dtype)


def _used_keys(cache: PagedCache) -> Tensor:
    """Return (B, P * page_size) bool: keys that are in use, on a page that exists."""
    position = torch.arange(cache.max_pages * cache.page_size, device=cache.device)
    used = position < cache.seqused_k[:, None]
    if cache.leftpad_k is not None:
        used &= position >= cache.leftpad_k[:, None]
    if cache.page_table is not None:
        used &= (cache.page_table >= 0).repeat_interleave(cache.page_size, 1)
    return used


def _by_position(cache: PagedCache, x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    if cache.page_table is None:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, cache.max_pages * cache.page_size - x.shape[1]))
        pages = x.unflatten(1, (cache.max_pages, cache.page_size))
    else:
        pages = x[cache.page_table.clamp(min=0).long()]
    if scale is not None:
        by_page = scale.to(dtype) if scale.ndim <= 1 else _by_logical_page(cache, scale.to(dtype))[:, :, None]
        pages = pages * by_page[..., None]
    return pages.flatten(1, 2)


def _by_logical_page(cache: PagedCache, x: Tensor) -> Tensor:
    """Reorder x from physical pages to logical pages, (B, P, ...)."""
    return x[:, : cache.max_pages] if cache.page_table is None else x[cache.page_table.clamp(min=0).long()]
