"""`sparse_decode`: attention of a decoding step over a kv cache, over all of its pages or those worth reading."""

from __future__ import annotations

import importlib
import os
from collections.abc import Hashable
from dataclasses import replace
from functools import cache as cache_results
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from dynaxx.arguments import typed
from dynaxx.errors import UnsupportedInputError
from dynaxx.kernels.decode_problem import DecodeProblem
from dynaxx.layout.paging import PagedCache, PageSummaries
from dynaxx.ops.attention import SparseAttentionOutput
from dynaxx.ops.checks import DTYPES, softmax_scale
from dynaxx.selection.pages import PageBudget

MOST_FORMS = 1024  # of inputs that are remembered; a cache that grows has another at every step
DECODE_BACKENDS = ("triton", "cpu", "reference")  # in the order that "auto" prefers


@overload
def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    pages: PageBudget | Tensor | None = None,
    *,
    scale: float | None = None,
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
        return_lse: also return the log-sum-exp of the visible scores.
        backend: "auto", or "triton", "cpu", "reference".

    Returns:
        out (batch, seqlen_q, q_heads, head_dim_v) in q's dtype, or (out, lse), lse (batch, q_heads, seqlen_q) fp32. A
        query that sees nothing gives out = 0, lse = -inf. No gradients: use `sparse_attention` to train.

    Raises:
        ValueError, TypeError: inputs that do not fit together. Values (lengths, page numbers) are checked on a CPU, on
            a GPU only with DYNAXX_DEBUG=1; there pages out of range are skipped.
        UnsupportedInputError: no backend, or not the named one, can serve; with the reasons of each.
    """
    kernels = kernels_for(q, cache, backend)
    scale = softmax_scale(scale, q.shape[-1])
    if isinstance(pages, PageBudget) and not pages.reads_everything:
        out, lse = kernels.select_and_attend(q, cache, *_choice(q, cache, pages), scale)
    else:
        listed = None if isinstance(pages, PageBudget) else pages
        if listed is not None:
            _check_block_indices(listed, cache)
        out, lse = kernels.attend_pages(q, cache, listed, None, scale)
    return SparseAttentionOutput(out, lse) if return_lse else out


@typed
@torch.no_grad()
def select_pages(
    q: Tensor, cache: PagedCache, budget: PageBudget, *, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Choose the pages that `sparse_decode(q, cache, budget)` reads.

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
    bound: float = 1.0,
    new_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> PagedCache:
    """Make the summaries that choosing pages needs, or bring those of a cache up to date.

    A page's summary is made again from its keys, so it never drifts, and the call may cover more than is new. Call it
    after writing keys and before the step that reads them.

    Args:
        cache: with summaries: they are updated in place. Without: new ones are made.
        bound: of new summaries; see `PageBudget`.
        new_tokens: the most keys that a sequence has gained (or had rewritten) at its end since the last call; None:
            all pages. A prefix that was cached by others is known by its physical pages.
        dtype: of new summaries, default bf16 (fp64 for fp64 caches).

    Returns:
        The cache, with its summaries.

    Raises:
        TypeError: no cache.
        ValueError: settings of new summaries for a cache that has some, or of an update for one that has none.
    """
    _check_cache(cache)
    if cache.summaries is None:
        if new_tokens is not None:
            raise ValueError("`new_tokens` must be None where the cache has no summaries: all pages are to be read")
        cache = replace(cache, summaries=PageSummaries.empty(cache, bound, dtype))
    elif dtype is not None or (bound != 1.0 and bound != cache.summaries.bound):
        raise ValueError("`bound` and `dtype` are of new summaries; this cache has some")
    if new_tokens is not None and new_tokens < 0:
        raise ValueError(f"`new_tokens` must be >= 0, got {new_tokens}")
    kernels = kernels_for(None, cache, backend)
    kernels.summarize_pages(cache, cache.summaries, new_tokens)
    return cache


def _choice(q: Tensor, cache: PagedCache, budget: PageBudget) -> tuple[Tensor, int, int, int]:
    """What a choice of pages is told: wanted, sinks, window, slots."""
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
    return wanted, budget.sinks, budget.window, budget.slots(cache, q.shape[1])


def check_decode(q: Tensor, cache: PagedCache) -> DecodeProblem:
    """Check that q fits the cache and the cache's values its sizes, and describe them."""
    _check_cache(cache)
    if q.ndim != 4 or q.shape[0] != cache.batch or q.shape[3] != cache.head_dim:
        raise ValueError(
            f"`q` must be (batch = {cache.batch}, seqlen_q, q_heads, head_dim = {cache.head_dim}), got {tuple(q.shape)}"
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"`q` must be one of {DTYPES}, got {q.dtype}")
    if q.device != cache.device:
        raise ValueError(f"`q` must be on the cache's device {cache.device}, got {q.device}")
    if 0 in (q.shape[2], cache.kv_heads) or q.shape[2] % cache.kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, both >= 1, got {q.shape[2]} and {cache.kv_heads}")
    if cache.exact is not None and q.shape[1] > cache.exact.window:
        raise ValueError(
            f"`q` must have at most {cache.exact.window} tokens, the window of the cache's exact tokens, "
            f"got {q.shape[1]}: use PagedCache.quantized(..., window={q.shape[1]}) or more"
        )
    _check_values(cache)
    return _problem(cache, q.dtype, q.shape[1], q.shape[2])


def _check_cache(cache: object) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"`cache` must be a PagedCache, got {type(cache).__name__}; see PagedCache.contiguous")


def kernels_for(q: Tensor | None, cache: PagedCache, backend: str) -> ModuleType:
    """Check a call and choose its kernels; for inputs of a known form, those found before. No q: none is asked for."""
    _check_cache(cache)
    form = None if q is None else (q.shape, q.dtype, q.device)
    key = (cache.form, form, backend)
    kernels = _known.get(key)
    if kernels is not None:
        _check_values(cache)
        return kernels
    if q is None:
        _check_values(cache)
    problem = _problem(cache, torch.float32, 1, cache.kv_heads) if q is None else check_decode(q, cache)
    kernels = _choose(problem, backend)
    if len(_known) >= MOST_FORMS:
        _known.clear()
    _known[key] = kernels
    return kernels


_known: dict[Hashable, ModuleType] = {}


def _problem(cache: PagedCache, dtype: torch.dtype, seqlen_q: int, q_heads: int) -> DecodeProblem:
    return DecodeProblem(
        device=cache.device,
        dtype=dtype,
        cache_dtype=cache.k.dtype,
        batch=cache.batch,
        seqlen_q=seqlen_q,
        max_seqlen_k=cache.max_pages * cache.page_size,
        q_heads=q_heads,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        head_dim_v=cache.head_dim_v,
        page_size=cache.page_size,
        paged=cache.is_paged,
    )


def _choose(problem: DecodeProblem, backend: str) -> ModuleType:
    """The decode kernels of `_backend`."""
    return _load(f"dynaxx.kernels.{_backend(problem, backend)}.decode")


def _backend(problem: DecodeProblem, backend: str) -> str:
    """The named backend, or the first that can serve."""
    if backend != "auto" and backend not in DECODE_BACKENDS:
        raise ValueError(f"`backend` must be 'auto' or one of {DECODE_BACKENDS}, got {backend!r}")
    reasons: dict[str, list[str]] = {}
    for name in DECODE_BACKENDS if backend == "auto" else (backend,):
        reasons[name] = _unsupported_reasons(name, problem)
        if not reasons[name]:
            return name
    raise UnsupportedInputError(str(problem), reasons)


def _unsupported_reasons(name: str, problem: DecodeProblem) -> list[str]:
    where = "support" if name == "triton" else "decode"  # asking must not load triton
    module = _load(f"dynaxx.kernels.{name}.{where}")
    ask = module.decode_reasons if name == "triton" else module.unsupported_reasons
    found: list[str] = ask(problem)
    return found


_load = cache_results(importlib.import_module)


def _looks_at_values(device: torch.device) -> bool:
    return device.type == "cpu" or os.environ.get("DYNAXX_DEBUG") == "1"


def _check_values(cache: PagedCache) -> None:
    if not _looks_at_values(cache.device) or cache.batch == 0:
        return
    capacity = cache.max_keys
    used = cache.seqused_k.tolist()  # one read: this is in the way of every step
    if min(used) < 0 or max(used) > capacity:
        raise ValueError(f"`seqused_k` must be from 0 to the cache's {capacity} keys, got {min(used)} to {max(used)}")
    if cache.leftpad_k is not None and (least := min(cache.leftpad_k.tolist())) < 0:
        raise ValueError(f"`leftpad_k` must be >= 0, got {least}")
    if cache.page_table is not None and cache.page_table.numel():
        least, most = (int(x) for x in cache.page_table.aminmax())
        if least < -1 or most >= cache.k.shape[0]:
            raise ValueError(
                f"`page_table` must hold -1 or pages below {cache.k.shape[0]}, got values from {least} to {most}"
            )


def _check_block_indices(pages: Tensor, cache: PagedCache) -> None:
    if not isinstance(pages, Tensor):
        raise TypeError(f"`pages` must be a PageBudget, block_indices or None, got {type(pages).__name__}")
    if pages.ndim != 3 or pages.shape[:2] != (cache.batch, cache.kv_heads) or pages.dtype != torch.int32:
        raise ValueError(
            f"block_indices must be (batch = {cache.batch}, kv_heads = {cache.kv_heads}, slots) int32, "
            f"got {pages.dtype} {tuple(pages.shape)}"
        )
    if pages.device != cache.device:
        raise ValueError(f"block_indices must be on the cache's device {cache.device}, got {pages.device}")
    if not _looks_at_values(cache.device) or pages.numel() == 0:
        return
    least, most = (int(x) for x in pages.aminmax())
    if least < -1 or most >= cache.max_pages:
        raise ValueError(f"block_indices must hold -1 or pages below {cache.max_pages}, got {least} to {most}")
    in_order = pages.sort(-1).values
    if bool(((in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)).any()):
        raise ValueError("block_indices must not name a page twice in one row")
