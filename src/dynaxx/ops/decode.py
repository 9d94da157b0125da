# SPDX-License-Identifier: Apache-2.0
"""`sparse_decode`: attention of a decode step over all pages of a kv cache, or over selected pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from dynaxx.arguments import as_integer, number, typed
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.host import never_traced
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import check_sinks, check_softcap
from dynaxx.ops.decode_checks import check_block_indices, check_cache, keys_before, serving
from dynaxx.ops.flops import count, decode_flops, is_counting
from dynaxx.selection.pages import PageBudget


@overload
def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    pages: PageBudget | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    pages: PageBudget | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: Literal[True],
    backend: str = "auto",
) -> SparseAttentionOutput: ...


@never_traced
@typed
@torch.no_grad()
def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    pages: PageBudget | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | SparseAttentionOutput:
    """Attend from the last tokens of each sequence to its cache. Exact over the pages that are read.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), fp16, bf16, fp32 or fp64, any strides: the last `seqlen_q` tokens of
            each sequence. Their keys must be in the cache already. They see each other causally.
        cache: keys and values; q_heads must be a multiple of its kv_heads. fp8 and int8 caches are dequantized.
        pages: a budget, to select pages by the cache's summaries; or block_indices (batch, kv_heads, slots) int32,
            logical pages in any order, -1 = empty, no duplicates; or None for all pages, which is dense attention.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: c > 0 caps each scaled score s to c * tanh(s / c), as in Gemma 2. It does not affect which pages a
            budget selects.
        sinks: (q_heads,), one logit per head that is added to each softmax's denominator and has no value, as in
            gpt-oss. Sinks are neither scaled nor capped.
        window_size: (left, right), number of keys visible before and after the query's own; -1 = unlimited. `right`
            must be -1 or 0, which are equivalent here. A sliding window of W keys is (W - 1, 0). Cannot be combined
            with a budget.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", "triton", "cpu" or "reference".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) in q's dtype, or (out, lse) with lse (batch, q_heads, seqlen_q) fp32.
        A query that sees nothing has out = 0 and lse = -inf; with sinks, lse is its head's sink. There are no
        gradients; use `sparse_attention` for training.

    Raises:
        ValueError, TypeError: the inputs do not match each other. Lengths and page numbers are checked on a CPU, and on
            a GPU with DYNAXX_DEBUG=1; otherwise GPU kernels skip pages that are out of range.
        UnsupportedInputError: no backend, or not the named one, can serve the call; lists the reasons of each.
    """
    backend, kernels = serving(q, cache, backend)
    scale = softmax_scale(scale, q.shape[-1])
    softcap = None if softcap is None else check_softcap(softcap)
    left = keys_before(window_size)
    if sinks is not None:
        check_sinks(sinks, q)
    if backend != "reference" and is_counting():
        count(decode_flops(q, cache, pages, left))
    if isinstance(pages, PageBudget) and not pages.reads_everything:
        if left is not None:
            raise ValueError(
                f"`window_size` must be (-1, -1) if a budget selects pages, got {window_size}; "
                "a window already reads few pages, so leave `pages` out"
            )
        choice = (*_choice(q, cache, pages), scale)
        if kernels.select_and_attend is not None:
            out, lse = kernels.select_and_attend(q, cache, *choice, softcap, sinks)
        else:
            chosen, counts = kernels.select_pages(q, cache, *choice)
            out, lse = kernels.attend_pages(q, cache, chosen, counts, scale, softcap, sink_logits=sinks)
    else:
        listed = None if isinstance(pages, PageBudget) else pages
        if listed is not None:
            check_block_indices(listed, cache)
        left = None if left is None else min(left, cache.max_keys)
        out, lse = kernels.attend_pages(q, cache, listed, None, scale, softcap, left, sinks)
    return SparseAttentionOutput(out, lse) if return_lse else out


@never_traced
@typed
@torch.no_grad()
def select_pages(
    q: Tensor, cache: PagedCache, budget: PageBudget, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Select the pages that `sparse_decode(q, cache, budget)` reads.

    Args:
        q: queries, as for `sparse_decode`.
        cache: a cache with summaries.
        budget: how many pages to select; see `PageBudget`.
        scale: softmax scale, default head_dim ** -0.5.
        backend: as for `sparse_decode`.

    Returns:
        block_indices (batch, kv_heads, slots) int32: logical pages in ascending order, padded with -1. `slots` depends
        on the sizes of the tensors, never on sequence lengths.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_decode`; ValueError also if the cache has no
            summaries or their `bound` differs from the budget's.
    """
    kernels = serving(q, cache, backend).decode
    scale = softmax_scale(scale, q.shape[-1])
    chosen: Tensor = kernels.select_pages(q, cache, *_choice(q, cache, budget), scale)[0]
    return chosen


@never_traced
@typed
@torch.no_grad()
def summarize_pages(
    cache: PagedCache,
    *,
    bound: float | None = None,
    new_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> PagedCache:
    """Create the summaries that page selection needs, or update those of a cache.

    Summaries are always recomputed from the keys of a page, so they never drift, and a call may cover more tokens than
    are new. Call this function after writing keys and before the step that reads them.

    Args:
        cache: summaries of the cache are updated in place; if it has none, new ones are created.
        bound: bound of new summaries, 1.0 by default; see `PageBudget`.
        new_tokens: upper bound for the number of keys that were appended or rewritten at the end of any sequence since
            the last call; None: recompute all pages. Pages of a cached prefix keep their summaries.
        dtype: dtype of new summaries: int8 by default (fp64 for fp64 caches), or a float dtype that caches may have.
        backend: as for `sparse_decode`.

    Returns:
        The cache with its summaries.

    Raises:
        TypeError: `cache` is not a PagedCache.
        ValueError: `bound` or `dtype` differs from that of existing summaries, or `new_tokens` is given without them.
    """
    check_cache(cache)
    bound = None if bound is None else number("bound", bound)
    new_tokens = None if new_tokens is None else as_integer("new_tokens", new_tokens)
    if cache.summaries is None:
        if new_tokens is not None:
            raise ValueError("`new_tokens` must be None if the cache has no summaries, because all pages must be read")
        cache = replace(cache, summaries=PageSummaries.empty(cache, 1.0 if bound is None else bound, dtype))
    elif bound not in (None, cache.summaries.bound) or dtype not in (None, cache.summaries.low.dtype):
        raise ValueError(
            f"`bound` and `dtype` must match the cache's summaries, {cache.summaries.bound} and "
            f"{cache.summaries.low.dtype}, or be omitted, got {bound} and {dtype}"
        )
    if new_tokens is not None and new_tokens < 0:
        raise ValueError(f"`new_tokens` must be >= 0, got {new_tokens}")
    kernels = serving(None, cache, backend).decode
    assert cache.summaries is not None, "created above"
    kernels.summarize_pages(cache, cache.summaries, None if new_tokens is None else min(new_tokens, cache.max_keys))
    return cache


def _choice(q: Tensor, cache: PagedCache, budget: PageBudget) -> tuple[Tensor, int, int, int]:
    """Return the arguments of a page selection: wanted, sinks, window, slots."""
    if not isinstance(budget, PageBudget):
        raise TypeError(f"`budget` must be a PageBudget, got {type(budget).__name__}; use PageBudget.of(rule)")
    if cache.summaries is None:
        raise ValueError("`cache` must have summaries to select pages; add them with summarize_pages(cache)")
    if cache.summaries.bound != budget.bound:
        raise ValueError(
            f"the cache's summaries have bound {cache.summaries.bound}, but the budget requires {budget.bound}; "
            "use summarize_pages(cache, bound=budget.bound)"
        )
    wanted = budget.wanted(cache.kv_heads, cache.device)
    sinks, window = (min(tokens, cache.max_keys) for tokens in (budget.sinks, budget.window))
    return wanted, sinks, window, budget.slots(cache, q.shape[1])
