# SPDX-License-Identifier: Apache-2.0
"""Checks of a decode step's inputs that run before any backend sees them."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from dynaxx.core.library import ISA_VARIABLE
from dynaxx.derivatives import refuse_transforms
from dynaxx.kernels.decode.contract import DecodeKernels, DecodeProblem
from dynaxx.kernels.registry import DECODE
from dynaxx.layout.entries import has_duplicates
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.checks import DTYPES, looks_at_values


def check_cache(cache: object) -> None:
    """Raise TypeError for anything but a `PagedCache`."""
    if not isinstance(cache, PagedCache):
        raise TypeError(f"`cache` must be a PagedCache, got {type(cache).__name__}; see PagedCache.contiguous")


def check_queries(q: Tensor, cache: PagedCache) -> None:
    """Check that q matches the cache.

    Raises:
        TypeError: the dtype is not supported.
        ValueError: a shape or device does not match, or q has more tokens than the cache's exact window covers.
    """
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
            f"got {q.shape[1]}; use PagedCache.quantized(..., window={q.shape[1]}) or a larger window"
        )


def keys_before(window_size: tuple[int, int]) -> int | None:
    """Return how many keys before its own a query sees; None for all.

    Raises:
        ValueError: `window_size` is not (left, right) with left >= -1 and right -1 or 0.
    """
    if len(window_size) != 2 or window_size[0] < -1 or window_size[1] not in (-1, 0):
        raise ValueError(
            "`window_size` must be (left, right) with left >= -1 and right -1 or 0, because no key follows the last "
            f"query's, got {window_size}; a sliding window of W keys is (W - 1, 0)"
        )
    return None if window_size[0] == -1 else int(window_size[0])


def check_values(cache: PagedCache) -> None:
    """Check lengths and page numbers against the sizes of the cache, on a CPU or with DYNAXX_DEBUG=1."""
    if not looks_at_values(cache.device) or cache.batch == 0:
        return
    capacity = cache.max_keys
    used = cache.seqused_k.tolist()  # one read, because every decode step waits for it
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


def check_block_indices(pages: Tensor, cache: PagedCache) -> None:
    """Check block indices for this cache; their values only on a CPU or with DYNAXX_DEBUG=1."""
    if not isinstance(pages, Tensor):
        raise TypeError(f"`pages` must be a PageBudget, block_indices or None, got {type(pages).__name__}")
    if pages.ndim != 3 or pages.shape[:2] != (cache.batch, cache.kv_heads) or pages.dtype != torch.int32:
        raise ValueError(
            f"`pages` must be block_indices (batch = {cache.batch}, kv_heads = {cache.kv_heads}, slots) int32, "
            f"got {pages.dtype} {tuple(pages.shape)}"
        )
    if pages.device != cache.device:
        raise ValueError(f"`pages` must be on the cache's device {cache.device}, got {pages.device}")
    if not looks_at_values(cache.device) or pages.numel() == 0:
        return
    least, most = (int(x) for x in pages.aminmax())
    if least < -1 or most >= cache.max_pages:
        raise ValueError(f"`pages` must hold -1 or pages below {cache.max_pages}, got {least} to {most}")
    if has_duplicates(pages):
        raise ValueError("`pages` must not name a page twice in one row; set duplicates to -1")


def check_places(name: str, page_table: Tensor, position: Tensor, page_size: int, *pools: Tensor) -> None:
    """Check that new keys fit into a cache, and that each has a place of its own. Reads values.

    Args:
        name: name of the page table, for messages.
        page_table: (batch, max_pages), physical page of each logical page.
        position: (batch, new), positions of the new keys in their sequences.
        page_size: tokens per page.
        *pools: (num_pages, page_size, ...), the tensors into which new rows will be written.

    Raises:
        ValueError: keys do not fit, or a page is missing, is not in the cache, or is written for two sequences.
    """
    if not position.numel():
        return
    capacity, num_pages = page_table.shape[1] * page_size, pools[0].shape[0]
    least, most = (int(x) for x in position.aminmax())
    if least < 0 or most >= capacity:
        raise ValueError(
            f"the cache must have space for the new keys, got positions {least} to {most} in sequences of {capacity}"
        )
    page = page_table.long().gather(1, position // page_size)
    least, most = (int(x) for x in page.aminmax())
    if least < 0 or most >= num_pages:
        raise ValueError(f"`{name}` must have a page for every new key, got a page that is -1 or not in the cache")
    place = page * page_size + position % page_size
    overlaps = any(n > 1 and step == 0 for x in pools for n, step in zip(x.shape, x.stride(), strict=True))
    if overlaps or len(place.unique()) < place.numel():
        raise ValueError(
            "new keys must have places of their own in the cache, got two sequences that write to one page"
        )


MAX_FORMS = 1024  # cached combinations of input shapes; a growing cache has a new one at every step


class Serving(NamedTuple):
    """The backend that serves a decode step."""

    backend: str
    decode: DecodeKernels


def serving(q: Tensor | None, cache: PagedCache, backend: str) -> Serving:
    """Check a call and return the backend that serves it, with its kernels. Without q, the call only reads the cache.

    Results are cached by the shapes and dtypes of the inputs, and on a CPU by the core that was asked for.

    Raises:
        ValueError, TypeError, UnsupportedInputError: like `sparse_decode`.
    """
    check_cache(cache)
    refuse_transforms("`sparse_decode`", q, fix="pass the mapped dimension as the batch")
    form = None if q is None else (q.shape, q.dtype, q.device, q.layout)
    isa = os.environ.get(ISA_VARIABLE) if cache.device.type == "cpu" else None
    key = (cache.form, form, backend, isa)
    found = _known.get(key)
    if found is None and q is not None:
        check_queries(q, cache)
    check_values(cache)
    if found is not None:
        return found
    name = DECODE.resolve(decode_problem(cache, q), backend)
    if len(_known) >= MAX_FORMS:
        _known.clear()
    found = _known[key] = Serving(name, DECODE.kernels(name))
    return found


_known: dict[Hashable, Serving] = {}


def decode_problem(cache: PagedCache, q: Tensor | None) -> DecodeProblem:
    """Describe a decode step for backends."""
    return DecodeProblem(
        device=cache.device,
        dtype=torch.float32 if q is None else q.dtype,
        cache_dtype=cache.k.dtype,
        batch=cache.batch,
        seqlen_q=1 if q is None else q.shape[1],
        max_seqlen_k=cache.max_pages * cache.page_size,
        q_heads=cache.kv_heads if q is None else q.shape[2],
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        head_dim_v=cache.head_dim_v,
        page_size=cache.page_size,
        paged=cache.is_paged,
    )
