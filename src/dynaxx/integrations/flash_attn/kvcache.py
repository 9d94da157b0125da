# SPDX-License-Identifier: Apache-2.0
"""`flash_attn_with_kvcache` of flash-attn 2.8, on dynaxx's decoding kernels.

A cache is read without a copy: a paged one through its table, a contiguous one as pages that are views of its rows, or
as it is where pages would not fit its length and strides. Only chosen rows of such a cache are copied.
Queries without causality or with a window to the right become sequences of one query each over the same pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.derivatives import refuse_transforms
from dynaxx.integrations.flash_attn.attention import arguments_named, check_window, refuse, softcap_of
from dynaxx.layout.host import never_traced
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.checks import looks_at_values
from dynaxx.ops.decode import sparse_decode
from dynaxx.ops.decode_checks import check_places

PAGES = (256, 128, 64, 32, 16)  # supported tokens per page
LOGICAL_PAGE = 64  # tokens per page of a cache that is read as it is


class _Pages(NamedTuple):
    """A cache in pages."""

    k: Tensor  # (num_pages, page_size, kv_heads, head_dim); without a table (batch, seqlen, kv_heads, head_dim)
    v: Tensor
    table: Tensor | None  # (batch, max_pages) int32
    page_size: int

    def cache(self, used: Tensor, leftpad: Tensor | None) -> PagedCache:
        """Return the cache of sequences with `used` keys, (batch,) int32."""
        if self.table is None:
            return PagedCache(self.k, self.v, used, leftpad_k=leftpad, page_size=self.page_size)
        first = torch.arange(self.table.shape[1], device=used.device) * self.page_size
        table = torch.where(first < used[:, None], self.table, -1)
        return PagedCache(self.k, self.v, used, table, leftpad_k=leftpad)

    def repeated(self, count: int) -> _Pages:
        """Return the cache with each sequence `count` times in a row; without a table, keys are copied."""
        if self.table is not None:
            return self._replace(table=self.table.repeat_interleave(count, 0))
        return self._replace(k=self.k.repeat_interleave(count, 0), v=self.v.repeat_interleave(count, 0))


@never_traced
@typed
@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values to a kv cache, then attend to it as `flash_attn.flash_attn_with_kvcache` does.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, kv_heads, head_dim), or with `block_table` (num_pages, page_size, kv_heads,
            head_dim). A page has 16, 32, 64, 128 or a multiple of 256 tokens.
        v_cache: the values, in the same form.
        k: (batch, seqlen_new, kv_heads, head_dim), written in place after the cached keys.
        v: (batch, seqlen_new, kv_heads, head_dim), written in place after the cached values.
        rotary_cos: (seqlen, rotary_dim / 2), applied to k and q. Needs k.
        rotary_sin: (seqlen, rotary_dim / 2), applied to k and q. Needs k.
        cache_seqlens: number of cached keys, one integer for all sequences or (batch,) int32. The default is the whole
            contiguous cache, which leaves no room for k.
        cache_batch_idx: (batch,) rows of a contiguous cache.
        cache_leftpad: (batch,) int32 number of hidden keys at the start.
        block_table: (batch, max_pages) int32; entries beyond a sequence's keys are ignored.
        softmax_scale: see `flash_attn_func`.
        causal: see `flash_attn_func`.
        window_size: see `flash_attn_func`.
        softcap: see `flash_attn_func`.
        rotary_interleaved: rotate neighbouring elements (GPT-J) if True, halves (GPT-NeoX) if False.
        alibi_slopes: must be None.
        num_splits: must be 0; the kernel chooses.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        out (batch, seqlen_q, q_heads, head_dim), or (out, lse) with lse (batch, q_heads, seqlen_q) fp32. The result has
        no gradients.

    Raises:
        UnsupportedInputError: see `flash_attn_func`.
        ValueError: see `flash_attn_func`.
        TypeError: see `flash_attn_func`.
    """
    refuse("flash_attn_with_kvcache", alibi_slopes=alibi_slopes)
    refuse_transforms("`flash_attn_with_kvcache`", q, k_cache, v_cache, fix="pass the mapped dimension as the batch")
    cap, (left, right) = softcap_of(softcap), check_window(window_size)
    if num_splits != 0:
        raise ValueError(f"`num_splits` must be 0, got {num_splits}: the kernel chooses the splits")
    if q.ndim != 4 or k_cache.ndim != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            "`q`, `k_cache` and `v_cache` must be (batch, seqlen, heads, head_dim), the caches of the same lengths and "
            f"heads, got {tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    right = 0 if causal else right
    names = {"scale": "softmax_scale", "page_table": "block_table", "seqused_k": "cache_seqlens"}
    with arguments_named(**names, leftpad_k="cache_leftpad", k="k_cache", v="v_cache", cache="k_cache"):
        used = _lengths(cache_seqlens, q, k_cache, block_table)
        given = _given(q, k_cache, v_cache, cache_batch_idx, block_table)
    ordered = causal or left != -1 or right != -1
    q, used = _append(q, k, v, given, used, (rotary_cos, rotary_sin), rotary_interleaved, ordered)
    with arguments_named(**names, leftpad_k="cache_leftpad", k="k_cache", v="v_cache", cache="k_cache"):
        pages = _pages(given, cache_batch_idx, contiguous=block_table is None)
        if right == 0:
            cache, window = pages.cache(used, cache_leftpad), (left, 0)
            out, lse = sparse_decode(q, cache, scale=softmax_scale, softcap=cap, window_size=window, return_lse=True)
        else:
            out, lse = _each_query(q, pages, used, cache_leftpad, softmax_scale, cap, (left, right))
    return (out, lse) if return_softmax_lse else out


def _each_query(
    q: Tensor,
    pages: _Pages,
    used: Tensor,
    leftpad: Tensor | None,
    scale: float | None,
    cap: float | None,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Attend with each query as a sequence of its own, from its first to its last visible key."""
    batch, count, heads, _ = q.shape
    left, right = window_size
    position = used[:, None] - count + torch.arange(count, device=q.device, dtype=torch.int32)
    ends = used[:, None].expand(-1, count)
    if right != -1:
        ends = torch.minimum(ends, position + right + 1).clamp(min=0)
    starts = torch.zeros_like(position) if leftpad is None else leftpad[:, None].expand(-1, count)
    if left != -1:
        starts = torch.maximum(starts, position - left)
    cache = pages.repeated(count).cache(ends.reshape(-1).contiguous(), starts.reshape(-1).contiguous())
    out, lse = sparse_decode(q.reshape(batch * count, 1, heads, -1), cache, scale=scale, softcap=cap, return_lse=True)
    return out.reshape(batch, count, heads, -1), lse.reshape(batch, count, heads).transpose(1, 2).contiguous()


def _lengths(given: int | Tensor | None, q: Tensor, k_cache: Tensor, block_table: Tensor | None) -> Tensor:
    """Return the number of cached keys, (batch,) int32."""
    batch = q.shape[0]
    if given is None:
        if block_table is not None:
            raise ValueError("`cache_seqlens` must be given with `block_table`")
        given = k_cache.shape[1]
    if isinstance(given, int):
        return torch.full((batch,), given, dtype=torch.int32, device=q.device)
    if given.shape != (batch,) or given.dtype != torch.int32:
        raise ValueError(
            f"`cache_seqlens` must be an int or (batch = {batch},) int32, got {given.dtype} {tuple(given.shape)}"
        )
    return given


def _given(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None, block_table: Tensor | None) -> _Pages:
    """Return the cache in the caller's pages; a row of a contiguous cache is one page."""
    batch, length = q.shape[0], k_cache.shape[1]
    if block_table is not None and rows is not None:
        raise ValueError("`cache_batch_idx` must be None with `block_table`, which names the pages")
    if block_table is not None and (block_table.ndim != 2 or block_table.shape[0] != batch):
        raise ValueError(f"`block_table` must be (batch = {batch}, max_pages), got {tuple(block_table.shape)}")
    if block_table is not None and length not in PAGES and (not length or length % 256):
        raise ValueError(f"pages must hold 16, 32, 64, 128 or a multiple of 256 tokens, got {length}")
    if block_table is None:
        rows = torch.arange(batch, device=q.device) if rows is None else rows
        if rows.shape != (batch,):
            raise ValueError(f"`cache_batch_idx` must be (batch = {batch},), got {tuple(rows.shape)}")
        if rows.is_cpu and batch and (int(rows.min()) < 0 or int(rows.max()) >= k_cache.shape[0]):
            raise ValueError(f"`cache_batch_idx` must name rows below {k_cache.shape[0]}, got {rows.tolist()}")
        block_table = rows[:, None]
    return _Pages(k_cache, v_cache, block_table.to(torch.int32), length)


def _pages(given: _Pages, rows: Tensor | None, *, contiguous: bool) -> _Pages:
    """Return the cache in pages that decoding supports, as views where that is possible."""
    table, length = given.table, given.page_size
    assert table is not None, "`_given` makes one"
    size = next((size for size in PAGES if length and length % size == 0), 0)
    each = length // size if size else 0
    k, v = (x.unflatten(1, (each, size)).flatten(0, 1) if size else x for x in given[:2])
    if not size or k.data_ptr() != given.k.data_ptr() or v.data_ptr() != given.v.data_ptr():
        if not contiguous:
            raise ValueError("`k` and `v` must be contiguous in the dimensions pages and page_size")
        k, v = (x[: len(table)] if rows is None else x[rows] for x in given[:2])
        return _Pages(k, v, None, LOGICAL_PAGE)
    split = (table.long()[:, :, None] * each + torch.arange(each, device=table.device)).flatten(1)
    return _Pages(k, v, split.to(torch.int32), size)


def _append(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    pages: _Pages,
    used: Tensor,
    rotary: tuple[Tensor | None, Tensor | None],
    interleaved: bool,
    ordered: bool,
) -> tuple[Tensor, Tensor]:
    """Append new keys and values to the cache, and return the rotated q and the new lengths."""
    cos, sin = rotary
    if (k is None) != (v is None) or (cos is None) != (sin is None):
        raise ValueError("`k` needs `v`, and `rotary_cos` needs `rotary_sin`: give both or neither")
    if k is None or v is None:
        if cos is not None:
            raise ValueError("`rotary_cos` and `rotary_sin` need new `k` and `v`")
        return q, used
    if k.ndim != 4 or v.ndim != 4 or k.shape[0] != q.shape[0] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"`k` and `v` must be (batch = {q.shape[0]}, seqlen_new, kv_heads, head_dim), "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[2:] != pages.k.shape[2:] or v.shape[2:] != pages.v.shape[2:]:
        raise ValueError(
            f"`k` and `v` must have the heads and head_dim of the caches, {tuple(pages.k.shape[2:])} and "
            f"{tuple(pages.v.shape[2:])}, got {tuple(k.shape[2:])} and {tuple(v.shape[2:])}"
        )
    new = k.shape[1]
    place = used[:, None].long() + torch.arange(new, device=q.device)
    assert pages.table is not None, "`_given` makes one"
    if looks_at_values(place.device):
        check_places("block_table", pages.table, place, pages.page_size, pages.k, pages.v)
    if cos is not None and sin is not None:
        k = _rotated(k, cos, sin, place, interleaved)
        at = used[:, None].long() + (torch.arange(q.shape[1], device=q.device) if ordered else 0)
        q = _rotated(q, cos, sin, at.expand(-1, q.shape[1]), interleaved)
    where = pages.table.gather(1, place // pages.page_size).long(), place % pages.page_size
    pages.k[where] = k.to(pages.k.dtype)
    pages.v[where] = v.to(pages.v.dtype)
    return q, used + new


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, place: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (batch, seqlen, heads, head_dim) by its positions (batch, seqlen)."""
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[3]:
        raise ValueError(f"`rotary_cos` and `rotary_sin` must be (seqlen, rotary_dim / 2), got {tuple(cos.shape)}")
    if place.is_cpu and place.numel() and int(place.max()) >= cos.shape[0]:
        raise ValueError(f"`rotary_cos` must cover position {int(place.max())}, got {cos.shape[0]}")
    width = 2 * cos.shape[1]
    turned, rest = x[..., :width].float(), x[..., width:]
    c, s = (each[place].float()[:, :, None] for each in (cos, sin))
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * c - second * s, first * s + second * c
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined.to(x.dtype), rest), -1)
