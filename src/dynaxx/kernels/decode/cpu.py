# SPDX-License-Identifier: Apache-2.0
"""Decoding on a CPU: call the core."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, Structure, byref

import torch
from torch import Tensor

from dynaxx.core.library import active_library
from dynaxx.core.structures import raise_for_status, structure
from dynaxx.kernels.decode.contract import DecodeProblem
from dynaxx.kernels.runtime.core_arguments import ELEMENTS, readable, strides
from dynaxx.layout.host import address, never_traced, on_host
from dynaxx.layout.paging import PagedCache, PageStrides, PageSummaries
from dynaxx.layout.paging.exact_tokens import ExactTokens

STORED = {**ELEMENTS, torch.int8: 3, torch.float8_e4m3fn: 4}  # equal to those in core/source/cache.h
NO_STRIDES = PageStrides(0, 0, 0, 0)
CacheArgs = structure("CacheArgs")
DecodeArgs = structure("DecodeArgs")
SummaryArgs = structure("SummaryArgs")
SelectArgs = structure("SelectArgs")
select_and_attend = None  # two calls of the core


def unsupported_reasons(problem: DecodeProblem) -> list[str]:
    """Return the reasons why the core cannot serve: another device, fp64, or no core."""
    reasons = []
    if problem.device.type != "cpu":
        reasons.append(f"tensors are on {problem.device}, not on the CPU")
    if problem.dtype not in ELEMENTS or problem.cache_dtype not in STORED:
        reasons.append(f"computes in fp32, got {problem.dtype} with a cache of {problem.cache_dtype}")
    if not reasons and active_library() is None:
        reasons.append("no C++ core is available; see dynaxx.kernels.attention.cpu.cpu_status()")
    return reasons


@on_host
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
    """Return out and lse like `kernels.decode.reference`; `counts` is not used. The core widens all dtypes to fp32."""
    batch, seqlen_q, q_heads, _ = q.shape
    q = readable(q)
    pages = None if block_indices is None else block_indices.contiguous()
    logits = None if sink_logits is None else sink_logits.detach().to(torch.float32).contiguous()
    out = q.new_empty(batch, seqlen_q, q_heads, cache.head_dim_v, dtype=torch.float32)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    arguments, _kept = _cache_args(cache)
    args = DecodeArgs(
        ctypes.pointer(arguments),
        address(q, q.dtype, (cache.batch, seqlen_q, q_heads, cache.head_dim), strided=True),
        ELEMENTS[q.dtype],
        strides(q),
        seqlen_q,
        q_heads,
        None if pages is None else address(pages, torch.int32, (batch, cache.kv_heads, pages.shape[2])),
        0 if pages is None else pages.shape[2],
        address(out, torch.float32, out.shape),
        address(lse, torch.float32, lse.shape),
        scale,
        torch.get_num_threads(),
        *_exact_args(cache.exact),
        softcap or 0.0,
        None if logits is None else address(logits, torch.float32, (q_heads,)),
        -1 if left is None else left,
    )
    raise_for_status(_library().dynaxx_cpu_decode(byref(args)))
    return out.to(q.dtype), lse


@on_host
def select_pages(
    q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, None]:
    """Return the selected pages like `kernels.decode.reference`, and None for the counts."""
    assert cache.summaries is not None, "checked before"
    q = readable(q)
    chosen = torch.empty(cache.batch, cache.kv_heads, slots, dtype=torch.int32)
    arguments, _kept = _cache_args(cache)
    summaries = _summary_args(arguments, cache.summaries, None)
    args = SelectArgs(
        ctypes.pointer(summaries),
        address(q, q.dtype, (cache.batch, *q.shape[1:3], cache.head_dim), strided=True),
        ELEMENTS[q.dtype],
        strides(q),
        q.shape[1],
        q.shape[2],
        address(wanted, torch.float32, (2, cache.kv_heads)),
        sinks,
        window,
        address(chosen, torch.int32, chosen.shape),
        slots,
        scale,
        torch.get_num_threads(),
    )
    raise_for_status(_library().dynaxx_cpu_select_pages(byref(args)))
    return chosen, None


@never_traced
def summarize_pages(cache: PagedCache, summaries: PageSummaries, new_tokens: int | None) -> None:
    """Write summaries, like `kernels.decode.reference`."""
    arguments, _kept = _cache_args(cache)
    raise_for_status(_library().dynaxx_cpu_summarize_pages(byref(_summary_args(arguments, summaries, new_tokens))))


def _cache_args(cache: PagedCache) -> tuple[Structure, list[Tensor]]:
    """Return the arguments, and the tensors that must stay alive while they are in use."""
    table, seqused = cache.page_table, cache.seqused_k.contiguous()
    leftpad = None if cache.leftpad_k is None else cache.leftpad_k.contiguous()
    if table is not None and table.stride(1) != 1 and table.shape[1] > 1:
        table = table.contiguous()
    scale_strides = lambda x: NO_STRIDES if x is None else cache.scale_strides(x)
    args = CacheArgs(
        address(cache.k, cache.k.dtype, cache.k.shape, strided=True),
        address(cache.v, cache.k.dtype, (*cache.k.shape[:3], cache.head_dim_v), strided=True),
        STORED[cache.k.dtype],
        cache.strides(cache.k),
        cache.strides(cache.v),
        _scale_address(cache.k_scale),
        _scale_address(cache.v_scale),
        scale_strides(cache.k_scale),
        scale_strides(cache.v_scale),
        None if table is None else address(table, torch.int32, (cache.batch, cache.max_pages), strided=True),
        0 if table is None else table.stride(0),
        address(seqused, torch.int32, (cache.batch,)),
        None if leftpad is None else address(leftpad, torch.int32, (cache.batch,)),
        cache.batch,
        cache.kv_heads,
        cache.max_pages,
        cache.page_size,
        cache.head_dim,
        cache.head_dim_v,
        cache.k.shape[0] if cache.is_paged else cache.max_pages,
        cache.max_keys,
    )
    return args, [x for x in (table, seqused, leftpad) if x is not None]


def _scale_address(scale: Tensor | None) -> int | None:
    """Return the address of fp32 scales; the core is told every stride."""
    return None if scale is None else address(scale[..., None], torch.float32, (*scale.shape, 1), strided=True)


def _exact_args(exact: ExactTokens | None) -> tuple[int | None, int | None, int, int, int]:
    if exact is None:
        return None, None, 0, 0, 0
    k, v = (address(x, exact.k.dtype, x.shape) for x in (exact.k, exact.v))
    return k, v, STORED[exact.k.dtype], exact.k.shape[1], exact.sinks


def _summary_args(cache: Structure, summaries: PageSummaries, new_tokens: int | None) -> Structure:
    return SummaryArgs(
        ctypes.pointer(cache),
        address(summaries.low, summaries.low.dtype, summaries.low.shape, strided=True),
        address(summaries.high, summaries.low.dtype, summaries.low.shape, strided=True),
        STORED[summaries.low.dtype],
        summaries.strides(),
        _scale_address(summaries.scale),
        summaries.scale_strides(),
        summaries.bound,
        -1 if new_tokens is None else new_tokens,
        torch.get_num_threads(),
    )


def _library() -> CDLL:
    library = active_library()
    assert library is not None, "`unsupported_reasons` refuses calls without a core"
    return library
