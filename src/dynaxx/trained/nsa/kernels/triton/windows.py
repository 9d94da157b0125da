# SPDX-License-Identifier: Apache-2.0
"""Windows of keys that new tokens complete, in Triton: gathered for a user's function, or pooled and stored directly.

Results are those of `kernels.nsa.reference_decode`. Lengths are read on the device, so one captured graph serves every
length.

Legend: B sequences, W windows per sequence; Hk kv heads; D head_dim of k or of v. Positions of compressed tokens are
defined in `trained.nsa.compressed_pages.CompressedPages`.
"""

import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.decode.triton.pages import PageTable, physical_pages, table_arguments
from dynaxx.kernels.device import padded
from dynaxx.kernels.runtime.launch_cache import record_or_replay
from dynaxx.kernels.runtime.launcher import kernel_launcher
from dynaxx.layout.paging import PagedCache, PageStrides
from dynaxx.trained.nsa.compressed_pages import CompressedPages, compressed_of
from dynaxx.trained.nsa.spans import NsaSizes


@triton.jit
def _window(p_seqused, i_entry, count, skip, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Return sequence and index of a window; the index is negative if the window does not exist."""
    i_b = i_entry // count
    beyond = tl.load(p_seqused + i_b) - LENGTH
    whole = tl.where(beyond < 0, 0, beyond // STRIDE + 1)
    return i_b, whole - skip - count + i_entry % count


@kernel_launcher
@triton.jit(do_not_specialize=["num_physical", "count", "skip", "heads"])
def _gather_windows_kernel(
    p_x, p_windows, p_table, p_seqused, p_leftpad, table_stride, num_physical, count, skip, heads,
    x_strides,  # `PageStrides`
    PAGED: tl.constexpr, HAS_LEFTPAD: tl.constexpr, PAGE: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gather one window of one head; zeros for a window that does not exist."""
    table = PageTable(p_table, table_stride, num_physical)
    i_entry, i_head = tl.program_id(0), tl.program_id(1)
    i_b, window = _window(p_seqused, i_entry, count, skip, LENGTH, STRIDE)
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    known = o_n < tl.where(window >= 0, LENGTH, 0)
    position = window * STRIDE + o_n
    physical = physical_pages(table, i_b, position // PAGE, known, PAGED).to(tl.int64)
    p_x += i_b.to(tl.int64) * x_strides.batch + i_head.to(tl.int64) * x_strides.head
    offsets = physical * x_strides.page + (position % PAGE).to(tl.int64) * x_strides.token
    mask = (o_d < D)[None, :]
    b_x = tl.load(p_x + offsets[:, None] + o_d[None, :], mask=mask & (physical >= 0)[:, None], other=0.0)
    row = (i_entry.to(tl.int64) * LENGTH + o_n) * heads + i_head
    tl.store(p_windows + row[:, None] * D + o_d[None, :], b_x, mask=mask & (o_n < LENGTH)[:, None])


@kernel_launcher
@triton.jit(do_not_specialize=["num_physical", "count", "skip", "heads"])
def _store_compressed_kernel(
    p_new, p_kept, p_table, p_seqused, p_leftpad, table_stride, num_physical, count, skip, heads,
    x_strides,  # `PageStrides`
    PAGED: tl.constexpr, HAS_LEFTPAD: tl.constexpr, PAGE: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store one compressed token of one head to its page; PAGE counts compressed tokens."""
    table = PageTable(p_table, table_stride, num_physical)
    i_entry, i_head = tl.program_id(0), tl.program_id(1)
    i_b, window = _window(p_seqused, i_entry, count, skip, LENGTH, STRIDE)
    place = window + LENGTH // STRIDE - 1
    known = window >= 0
    physical = physical_pages(table, i_b, place // PAGE, known, PAGED).to(tl.int64)
    if physical >= 0:
        o_d = tl.arange(0, BLOCK_D)
        b_x = tl.load(p_new + (i_entry.to(tl.int64) * heads + i_head) * D + o_d, mask=o_d < D, other=0.0)
        p_kept += i_b.to(tl.int64) * x_strides.batch + physical * x_strides.page + i_head.to(tl.int64) * x_strides.head
        p_kept += (place % PAGE).to(tl.int64) * x_strides.token
        tl.store(p_kept + o_d, b_x.to(p_kept.dtype.element_ty), mask=o_d < D)


@kernel_launcher
@triton.jit(do_not_specialize=["num_physical", "count", "skip", "heads"])
def _compress_windows_kernel(
    p_x, p_weight, p_kept, p_table, p_seqused, p_leftpad, table_stride, num_physical, count, skip, heads,
    x_strides, kept_strides,  # `PageStrides`
    PAGED: tl.constexpr, HAS_LEFTPAD: tl.constexpr, PAGE: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Pool one window of one head and store the result to its page."""
    KEPT: tl.constexpr = PAGE // STRIDE  # compressed tokens per page
    table = PageTable(p_table, table_stride, num_physical)
    i_entry, i_head = tl.program_id(0), tl.program_id(1)
    i_b, window = _window(p_seqused, i_entry, count, skip, LENGTH, STRIDE)
    place = window + LENGTH // STRIDE - 1
    known = window >= 0
    kept = physical_pages(table, i_b, place // KEPT, known, PAGED).to(tl.int64)
    if kept >= 0:
        o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        position, inside = window * STRIDE + o_n, o_n < LENGTH
        page = physical_pages(table, i_b, position // PAGE, inside, PAGED).to(tl.int64)
        p_x += i_b.to(tl.int64) * x_strides.batch + i_head.to(tl.int64) * x_strides.head
        offsets = page * x_strides.page + (position % PAGE).to(tl.int64) * x_strides.token
        mask = (page >= 0)[:, None] & (o_d < D)[None, :]
        b_x = tl.load(p_x + offsets[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(p_weight + o_n * heads + i_head, mask=inside, other=0.0).to(tl.float32)
            pooled = tl.sum(b_x * weight[:, None], 0)
        else:
            pooled = tl.sum(b_x, 0) / LENGTH
        p_kept += (
            i_b.to(tl.int64) * kept_strides.batch + kept * kept_strides.page + i_head.to(tl.int64) * kept_strides.head
        )
        p_kept += (place % KEPT).to(tl.int64) * kept_strides.token
        tl.store(p_kept + o_d, pooled.to(p_kept.dtype.element_ty), mask=o_d < D)


def gather_windows(cache: PagedCache, sizes: NsaSizes, count: int, skip: int) -> tuple[Tensor, Tensor]:
    """Return the windows, like `kernels.nsa.reference_decode`; zeros for windows that do not exist."""
    return _gathered(cache, cache.k, sizes, count, skip), _gathered(cache, cache.v, sizes, count, skip)


def _gathered(cache: PagedCache, x: Tensor, sizes: NsaSizes, count: int, skip: int) -> Tensor:
    windows = x.new_empty(cache.batch * count, sizes.cmp_block, *x.shape[2:])
    if windows.numel():
        _gather_windows_kernel[(cache.batch * count, cache.kv_heads)](
            x,
            windows,
            **_window_arguments(cache, x, sizes, cache.page_size, count, skip),
            BLOCK_N=triton.next_power_of_2(sizes.cmp_block),
        )
    return windows


def compress_windows(cache: PagedCache, weights: tuple[Tensor | None, Tensor | None], count: int, skip: int) -> None:
    """Pool windows and store them, like `kernels.nsa.reference_decode`, with one launch each for k and v."""
    record_or_replay(_compress, cache, weights, count, skip)


def _compress(cache, weight_k, weight_v, count, skip):
    compressed = compressed_of(cache)
    sizes = compressed.sizes
    for x, kept, weight in ((cache.k, compressed.k, weight_k), (cache.v, compressed.v, weight_v)):
        if count * cache.batch * cache.kv_heads:
            _compress_windows_kernel[(cache.batch * count, cache.kv_heads)](
                x,
                x if weight is None else weight.contiguous(),
                kept,
                **_window_arguments(cache, x, sizes, cache.page_size, count, skip),
                kept_strides=_strides(cache, kept, cache.page_size // sizes.cmp_stride),
                BLOCK_N=triton.next_power_of_2(sizes.cmp_block),
                WEIGHTED=weight is not None,
            )
    return ()


def store_compressed(
    cache: PagedCache, compressed: CompressedPages, k_cmp: Tensor, v_cmp: Tensor, count: int, skip: int
) -> None:
    """Store compressed tokens, like `kernels.nsa.reference_decode`."""
    sizes = compressed.sizes
    for kept, new in ((compressed.k, k_cmp), (compressed.v, v_cmp)):
        if new.numel():
            _store_compressed_kernel[(cache.batch * count, cache.kv_heads)](
                new.contiguous(),
                kept,
                **_window_arguments(cache, kept, sizes, cache.page_size // sizes.cmp_stride, count, skip),
            )


def _window_arguments(
    cache: PagedCache, x: Tensor, sizes: NsaSizes, page_size: int, count: int, skip: int
) -> dict[str, object]:
    """Return the arguments that all kernels here share: the pages of `x`, of `page_size` rows each, and the windows."""
    return {
        **table_arguments(cache),
        "count": count,
        "skip": skip,
        "heads": cache.kv_heads,
        "x_strides": _strides(cache, x, page_size),
        "PAGE": page_size,
        "LENGTH": sizes.cmp_block,
        "STRIDE": sizes.cmp_stride,
        "D": x.shape[3],
        "BLOCK_D": padded(x.shape[3]),
    }


def _strides(cache: PagedCache, x: Tensor, page_size: int) -> PageStrides:
    """Return strides of the cache's tensors, or of tensors of compressed tokens."""
    first, token, head, _ = x.stride()
    return PageStrides(0, first, token, head) if cache.is_paged else PageStrides(first, token * page_size, token, head)
