# SPDX-License-Identifier: Apache-2.0
"""Pages of a cache: their addresses, and their summaries.

Grids depend only on tensor sizes and lengths are read on the device, so a captured graph serves every length.

Legend: B batch, Hk kv heads, D head_dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.device import padded
from dynaxx.kernels.primitives.triton.conversion import nearest
from dynaxx.kernels.runtime.arguments import unit_stride
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout.paging import PagedCache, PageStrides, PageSummaries

KEYS_AT_ONCE = 4096  # numbers of a page's keys that the one warp of a program holds
PLACES = tl.constexpr(5)  # columns of `p_offsets`: k, low, high, their scale, k's scale
SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)


class PageTable(NamedTuple):
    """The places of the logical pages of sequences; unused unless PAGED."""

    p_table: Any  # (B, P) int32
    stride: Any
    num_physical: Any


class RowStrides(NamedTuple):
    """Strides of a tensor with one row per page and head, as one kernel argument; see `PageStrides`."""

    batch: int
    page: int
    head: int


@triton.jit
def first_key(p_leftpad, i_b, HAS_LEFTPAD: tl.constexpr):
    """Return the first key of a sequence that is not padding."""
    key = 0
    if HAS_LEFTPAD:
        key = tl.load(p_leftpad + i_b)
    return key


@triton.jit
def first_visible(p_leftpad, i_b, seqused, seqlen_q, left, HAS_LEFTPAD: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key that any query of a sequence sees."""
    key = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    if WINDOW:
        key = tl.maximum(key, seqused - seqlen_q - left)
    return key


@triton.jit
def physical_pages(table, i_b, page, known, PAGED: tl.constexpr):
    """Return the physical pages of logical pages, -1 for those that do not exist or are not `known`."""
    if PAGED:
        physical = tl.load(table.p_table + i_b.to(tl.int64) * table.stride + page, mask=known, other=-1)
        physical = tl.where((physical >= 0) & (physical < table.num_physical), physical, -1)
    else:
        physical = tl.where(known, page, -1)
    return physical


@kernel_launcher
@triton.jit(do_not_specialize=["kv_heads", "num_physical", "new_tokens", "pages_per_entry"])
def _summarize_pages_kernel(
    p_k,
    p_low,
    p_high,
    p_scale,
    p_k_scale,
    p_table,
    p_seqused,
    p_leftpad,
    p_offsets,  # (layers, PLACES) int64 if LAYERS: numbers from the first layer's tensors to each layer's
    table_stride,
    num_physical,
    kv_heads,
    new_tokens,  # -1: all
    pages_per_entry,
    max_pages,
    bound,
    k_strides,  # `PageStrides`
    k_scale_strides,  # `RowStrides`
    summary_strides,
    scale_strides,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,  # quantize to int8
    MEAN: tl.constexpr,
    LAYERS: tl.constexpr,  # many layers, whose caches differ in addresses only
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_entry, i_h = tl.program_id(0), tl.program_id(1)
    if LAYERS:
        p_of_layer = p_offsets + tl.program_id(2) * PLACES
        p_k += tl.multiple_of(tl.load(p_of_layer), 128 // p_k.dtype.element_ty.primitive_bitwidth)
        p_low += tl.multiple_of(tl.load(p_of_layer + 1), 128 // p_low.dtype.element_ty.primitive_bitwidth)
        p_high += tl.multiple_of(tl.load(p_of_layer + 2), 128 // p_high.dtype.element_ty.primitive_bitwidth)
        p_scale += tl.load(p_of_layer + 3)
        p_k_scale += tl.load(p_of_layer + 4)
    i_b = i_entry // pages_per_entry
    seqused = tl.load(p_seqused + i_b)
    leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    first_page = leftpad // PAGE
    if new_tokens >= 0:
        first_page = tl.maximum(first_page, tl.maximum(seqused - new_tokens, 0) // PAGE)
    page = first_page + i_entry % pages_per_entry
    start, stop = tl.maximum(page * PAGE, leftpad), tl.minimum((page + 1) * PAGE, seqused)
    known = (start < stop) & (page < max_pages)
    table = PageTable(p_table, table_stride, num_physical)
    physical = physical_pages(table, i_b, page, known, PAGED).to(tl.int64)
    if physical >= 0:
        o_d, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_D], tl.float32)
        low = tl.full([BLOCK_D], float("inf"), tl.float32)
        high = tl.full([BLOCK_D], float("-inf"), tl.float32)
        p_page = (
            p_k + i_b.to(tl.int64) * k_strides.batch + physical * k_strides.page + i_h.to(tl.int64) * k_strides.head
        )
        for first in range(0, PAGE, BLOCK_N):
            position = page * PAGE + first + o_n
            inside = ((position >= start) & (position < stop))[:, None]
            p_rows = p_page + (first + o_n).to(tl.int64)[:, None] * k_strides.token + o_d[None, :]
            b_k = tl.load(p_rows, mask=inside & (o_d < D)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(b_k, 0)
            low = tl.minimum(low, tl.min(tl.where(inside, b_k, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(inside, b_k, float("-inf")), 0))
        if SCALED:
            p_own = p_k_scale + i_b.to(tl.int64) * k_scale_strides.batch + physical * k_scale_strides.page
            k_scale = tl.load(p_own + i_h * k_scale_strides.head)
            total, low, high = total * k_scale, low * k_scale, high * k_scale
        mean = total / (stop - start).to(tl.float32)
        low, high = mean + bound * (low - mean), mean + bound * (high - mean)
        if ROUND:
            scale = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0) / 127, SMALLEST_SCALE)
            at = i_b.to(tl.int64) * scale_strides.batch + physical * scale_strides.page
            at += i_h.to(tl.int64) * scale_strides.head
            tl.store(p_scale + at, scale)
            low, high = nearest(tl.div_rn(low, scale)), nearest(tl.div_rn(high, scale))
        at = i_b.to(tl.int64) * summary_strides.batch + physical * summary_strides.page
        at += i_h.to(tl.int64) * summary_strides.head
        at += o_d
        tl.store(p_low + at, low.to(p_low.dtype.element_ty), mask=o_d < D)
        if MEAN == 0:
            tl.store(p_high + at, high.to(p_high.dtype.element_ty), mask=o_d < D)


def summarized_places(cache: PagedCache) -> tuple[Tensor, ...]:
    """Return the tensors of a layer that `summarize_pages` reads and writes by `offsets`, one per column of them."""
    summaries = cache.summaries
    assert summaries is not None, "the caller must have made them"
    scale = summaries.low if summaries.scale is None else summaries.scale
    return cache.k, summaries.low, summaries.high, scale, cache.k if cache.k_scale is None else cache.k_scale


def summarize_pages(
    cache: PagedCache, summaries: PageSummaries, new_tokens: int | None, offsets: Tensor | None = None
) -> None:
    """Write summaries, like `kernels.decode.reference`; with `offsets` those of every layer, see `layer_offsets`."""
    per_entry = cache.max_pages
    if new_tokens is not None:
        per_entry = min(per_entry, (new_tokens + cache.page_size - 2) // cache.page_size + 1 if new_tokens else 0)
    if cache.batch * per_entry * cache.kv_heads == 0:
        return
    table = table_arguments(cache)
    _summarize_pages_kernel[(cache.batch * per_entry, cache.kv_heads, 1 if offsets is None else len(offsets))](
        *summarized_places(cache),
        p_offsets=table["p_seqused"] if offsets is None else offsets,
        **table,
        kv_heads=cache.kv_heads,
        new_tokens=-1 if new_tokens is None else new_tokens,
        pages_per_entry=per_entry,
        max_pages=cache.max_pages,
        bound=summaries.bound,
        k_strides=cache.strides(cache.k),
        k_scale_strides=scale_strides_of(cache, cache.k_scale),
        summary_strides=row_strides(summaries.strides()),
        scale_strides=row_strides(summaries.scale_strides()),
        SCALED=cache.k_scale is not None,
        ROUND=summaries.scale is not None,
        MEAN=summaries.low is summaries.high,
        LAYERS=offsets is not None,
        PAGE=cache.page_size,
        D=cache.head_dim,
        BLOCK_D=padded(cache.head_dim),
        BLOCK_N=min(cache.page_size, max(16, KEYS_AT_ONCE // padded(cache.head_dim))),
        num_warps=1,  # sums need no other warp: on an H100 8,192 keys of 8 heads take 8 us, with four warps 19
    )


def layer_offsets(caches: Sequence[PagedCache]) -> Tensor | None:
    """Return where layers keep keys and summaries, (layers, PLACES) int64, for `summarize_pages`.

    Returns:
        The numbers between each tensor of the first layer and that of every layer; None if the layers differ in more
        than addresses, or if an address is no multiple of 16 bytes.
    """
    places = [summarized_places(cache) for cache in caches]
    if any(cache.form != caches[0].form for cache in caches):
        return None
    if any(x.data_ptr() % 16 for own in places for x in own[:3]):
        return None
    rows = [
        [(x.data_ptr() - first.data_ptr()) // x.itemsize for x, first in zip(own, places[0], strict=True)]
        for own in places
    ]
    offsets = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if caches[0].k.is_cuda:  # a copy from pinned memory does not wait for the GPU
        return offsets.pin_memory().to(caches[0].device, non_blocking=True)
    return offsets


def table_arguments(cache: PagedCache) -> dict[str, object]:
    """Return the addresses of pages and the lengths of sequences under the kernels' parameter names."""
    table = None if cache.page_table is None else unit_stride(cache.page_table)
    seqused = cache.seqused_k.contiguous()
    return {
        "p_table": seqused if table is None else table,
        "p_seqused": seqused,
        "p_leftpad": seqused if cache.leftpad_k is None else cache.leftpad_k.contiguous(),
        "table_stride": 0 if table is None else table.stride(0),
        "num_physical": cache.k.shape[0],
        "PAGED": table is not None,
        "HAS_LEFTPAD": cache.leftpad_k is not None,
    }


def row_strides(of: PageStrides) -> RowStrides:
    """Return the strides of a tensor with one row per page and head."""
    return RowStrides(of.batch, of.page, of.head)


def scale_strides_of(cache: PagedCache, scale: Tensor | None) -> RowStrides:
    """Return the strides of a scale; zeros without a scale."""
    return RowStrides(0, 0, 0) if scale is None else row_strides(cache.scale_strides(scale))


def cache_arguments(cache: PagedCache, unused: Tensor) -> dict[str, object]:
    """Return what kernels that attend to a cache read of it, under their parameter names; without k and v.

    Args:
        cache: the cache.
        unused: any tensor, for the pointers that no kernel reads because the cache has no such tensor.
    """
    scaled, exact = cache.k_scale is not None, cache.exact
    return {
        **table_arguments(cache),
        "p_k_scale": cache.k_scale if scaled else unused,
        "p_v_scale": cache.v_scale if scaled else unused,
        "p_exact_k": unused if exact is None else exact.k,
        "p_exact_v": unused if exact is None else exact.v,
        "k_strides": cache.strides(cache.k),
        "k_scale_strides": scale_strides_of(cache, cache.k_scale),
        "v_scale_strides": scale_strides_of(cache, cache.v_scale),
        "SCALED": scaled,
        "EXACT": exact_slots(cache),
        "SINKS": 0 if exact is None else exact.sinks,
        "PAGE": cache.page_size,
        "D": cache.head_dim,
        "E": cache.head_dim_v,
    }


def exact_slots(cache: PagedCache) -> int:
    """Return the number of exact tokens that a sequence of an 8-bit cache has memory for; 0 without any."""
    return 0 if cache.exact is None else cache.exact.k.shape[1]
