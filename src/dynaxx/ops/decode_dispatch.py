# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernels for a decode step."""

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
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode_checks import check_cache, check_queries, check_values

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
    refuse_transforms("`sparse_decode`", q)
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


def kernels_for(q: Tensor | None, cache: PagedCache, backend: str) -> DecodeKernels:
    """Return the kernels for `sparse_decode` and page selection; raises like `serving`."""
    return serving(q, cache, backend).decode


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
