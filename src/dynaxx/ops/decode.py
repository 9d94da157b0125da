# SPDX-License-Identifier: Apache-2.0
"""`sparse_decode`: attention of a decoding step over a kv cache, over all of its pages or those worth reading."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.kernels.scale import softmax_scale
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import check_sinks, check_softcap
from dynaxx.ops.decode_checks import check_block_indices, check_cache, keys_before
from dynaxx.ops.decode_dispatch import kernels_for
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
    """Attend from the last tokens of each sequence to its cache, exactly over the pages that are read.

    Args:
        q: (batch, seqlen_q, q_heads, head_dim), fp16, bf16, fp32 or fp64, any strides: the last `seqlen_q` tokens of
            each sequence, whose keys are in the cache already. Causal among themselves.
        cache: keys and values; q_heads must be a multiple of its kv_heads. fp8 and int8 are computed as their values.
        pages: a budget: pages are chosen here, by the cache's summaries. Or block_indices (batch, kv_heads, slots)
            int32: logical pages in any order, -1 = empty, no duplicates. Or None: all pages, which is dense attention.
        scale: softmax scale, default head_dim ** -0.5.
        softcap: c > 0 caps each score s to c * tanh(s / c), after the scale, as in Gemma 2. It does not change which
            pages a budget chooses.
        sinks: (q_heads,), a logit per head that joins each softmax's denominator and has no value, as in gpt-oss; not
            scaled, not capped.
        window_size: (left, right), keys visible before and after a query's own; -1 = unlimited. right must be -1 or 0,
            which mean the same here. A sliding window of W keys is (W - 1, 0). Not together with a budget.
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", or "triton", "cpu", "reference".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) in q's dtype, or (out, lse), lse (batch, q_heads, seqlen_q) fp32. A
        query that sees nothing gives out = 0, lse = -inf; with sinks lse = its head's sink. No gradients: use
        `sparse_attention` to train.

    Raises:
        ValueError, TypeError: inputs that do not fit together. Values (lengths, page numbers) are checked on a CPU, on
            a GPU only with DYNAXX_DEBUG=1; there pages out of range are skipped.
        UnsupportedInputError: no backend, or not the named one, can serve; with the reasons of each.
    """
    kernels = kernels_for(q, cache, backend)
    scale = softmax_scale(scale, q.shape[-1])
    softcap = None if softcap is None else check_softcap(softcap)
    left = keys_before(window_size)
    if sinks is not None:
        check_sinks(sinks, q)
    if isinstance(pages, PageBudget) and not pages.reads_everything:
        if left is not None:
            raise ValueError(
                f"`window_size` must be (-1, -1) where a budget chooses pages, got {window_size}: "
                "a window reads few pages already, leave `pages` out"
            )
        out, lse = kernels.select_and_attend(q, cache, *_choice(q, cache, pages), scale, softcap, sinks)
    else:
        listed = None if isinstance(pages, PageBudget) else pages
        if listed is not None:
            check_block_indices(listed, cache)
        left = None if left is None else min(left, cache.max_keys)
        out, lse = kernels.attend_pages(q, cache, listed, None, scale, softcap, left, sinks)
    return SparseAttentionOutput(out, lse) if return_lse else out


@typed
@torch.no_grad()
def select_pages(
    q: Tensor, cache: PagedCache, budget: PageBudget, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Choose the pages that `sparse_decode(q, cache, budget)` reads.

    Args:
        q, cache, scale, backend: as `sparse_decode`; the cache with summaries.
        budget: how many pages; see `PageBudget`.

    Returns:
        block_indices (batch, kv_heads, slots) int32: logical pages, ascending, then -1. `slots` depends on sizes alone,
        never on lengths.

    Raises:
        As `sparse_decode`; ValueError, too, where the cache has no summaries, or some of another bound.
    """
    kernels = kernels_for(q, cache, backend)
    scale = softmax_scale(scale, q.shape[-1])
    chosen: Tensor = kernels.select_pages(q, cache, *_choice(q, cache, budget), scale)[0]
    return chosen


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
    """Make the summaries that choosing pages needs, or bring those of a cache up to date.

    A page's summary is made again from its keys, so it never drifts, and the call may cover more than is new. Call it
    after writing keys and before the step that reads them.

    Args:
        cache: with summaries: they are updated in place. Without: new ones are made.
        bound: of new summaries, 1.0 by default; see `PageBudget`.
        new_tokens: the most keys that a sequence has gained (or had rewritten) at its end since the last call; None:
            all pages. A prefix that was cached by others is known by its physical pages.
        dtype: of new summaries: int8 by default (fp64 for fp64 caches), or a float dtype of caches.
        backend: as `sparse_decode`.

    Returns:
        The cache, with its summaries.

    Raises:
        TypeError: no cache.
        ValueError: other settings than those of the summaries that a cache has, or an update of one that has none.
    """
    check_cache(cache)
    if cache.summaries is None:
        if new_tokens is not None:
            raise ValueError("`new_tokens` must be None where the cache has no summaries: all pages are to be read")
        cache = replace(cache, summaries=PageSummaries.empty(cache, 1.0 if bound is None else bound, dtype))
    elif bound not in (None, cache.summaries.bound) or dtype not in (None, cache.summaries.low.dtype):
        raise ValueError(
            f"`bound` and `dtype` must be those of the cache's summaries, {cache.summaries.bound} and "
            f"{cache.summaries.low.dtype}, or left out, got {bound} and {dtype}"
        )
    if new_tokens is not None and new_tokens < 0:
        raise ValueError(f"`new_tokens` must be >= 0, got {new_tokens}")
    kernels = kernels_for(None, cache, backend)
    assert cache.summaries is not None, "made above"
    kernels.summarize_pages(cache, cache.summaries, None if new_tokens is None else min(new_tokens, cache.max_keys))
    return cache


def _choice(q: Tensor, cache: PagedCache, budget: PageBudget) -> tuple[Tensor, int, int, int]:
    """Return what a choice of pages is told: wanted, sinks, window, slots."""
    if not isinstance(budget, PageBudget):
        raise TypeError(f"`budget` must be a PageBudget, got {type(budget).__name__}; PageBudget.of(rule) makes one")
    if cache.summaries is None:
        raise ValueError("`cache` must have summaries for pages to be chosen: cache = summarize_pages(cache)")
    if cache.summaries.bound != budget.bound:
        raise ValueError(
            f"the cache's summaries have bound {cache.summaries.bound}, the budget asks for {budget.bound}: "
            "use summarize_pages(cache, bound=budget.bound)"
        )
    wanted = budget.wanted(cache.kv_heads, cache.device)
    sinks, window = (min(tokens, cache.max_keys) for tokens in (budget.sinks, budget.window))
    return wanted, sinks, window, budget.slots(cache, q.shape[1])
