"""Which kernels a decoding step runs on."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from functools import cache as cache_results
from types import ModuleType

import torch
from torch import Tensor

from dynaxx.kernels.decode_problem import DecodeProblem
from dynaxx.layout.paging import PagedCache
from dynaxx.ops.decode_checks import check_cache, check_queries, check_values
from dynaxx.ops.dispatch import first_that_serves

MOST_FORMS = 1024  # of inputs that are remembered; a cache that grows has another at every step
DECODE_BACKENDS = ("triton", "cpu", "reference")  # in the order that "auto" prefers


def kernels_for(q: Tensor | None, cache: PagedCache, backend: str) -> ModuleType:
    """Check a call and choose its kernels; for inputs of a known form, those found before. No q: none is asked for.

    Raises:
        ValueError, TypeError, UnsupportedInputError: as `sparse_decode`.
    """
    check_cache(cache)
    form = None if q is None else (q.shape, q.dtype, q.device)
    key = (cache.form, form, backend)
    kernels = _known.get(key)
    if kernels is None and q is not None:
        check_queries(q, cache)
    check_values(cache)
    if kernels is not None:
        return kernels
    problem = _problem(cache, q)
    name = first_that_serves(problem, DECODE_BACKENDS, backend, _unsupported_reasons)
    kernels = _load("dynaxx.kernels.triton.decode.launch" if name == "triton" else f"dynaxx.kernels.{name}.decode")
    if len(_known) >= MOST_FORMS:
        _known.clear()
    _known[key] = kernels
    return kernels


_known: dict[Hashable, ModuleType] = {}


def _problem(cache: PagedCache, q: Tensor | None) -> DecodeProblem:
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


def _unsupported_reasons(name: str, problem: DecodeProblem) -> list[str]:
    where = "support" if name == "triton" else "decode"  # asking must not load triton
    module = _load(f"dynaxx.kernels.{name}.{where}")
    ask = module.decode_reasons if name == "triton" else module.unsupported_reasons
    found: list[str] = ask(problem)
    return found


_load = cache_results(importlib.import_module)
