# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Choosing pages in Triton: scores from summaries, the best of them without sorting, and the summaries themselves.

Grids depend on sizes alone; lengths are read on the device, so a captured graph serves every length.

Shapes: B batch, N queries of a step, Hq / Hk query and kv heads, D head_dim, P logical pages, S slots. A list is one
(batch entry, kv head).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.launch import strides, unit_stride
from dynaxx.kernels.triton.primitives import ordered_bits
from dynaxx.layout.paging import PagedCache, PageStrides, PageSummaries

PAGES_PER_PROGRAM = 32
QUERY_ROWS = 16
KEY_ROWS = 64


@triton.jit
def first_key(p_leftpad, i_b, HAS_LEFTPAD: tl.constexpr):
    """The first key of a sequence that is no padding."""
    key = 0
    if HAS_LEFTPAD:
        key = tl.load(p_leftpad + i_b)
    return key


@triton.jit
def physical_pages(p_table, table_stride, i_b, page, known, num_physical, PAGED: tl.constexpr):
    """Where logical pages lie, -1 for those that are not there or not `known`."""
    if PAGED:
        physical = tl.load(p_table + i_b.to(tl.int64) * table_stride + page, mask=known, other=-1)
        physical = tl.where((physical >= 0) & (physical < num_physical), physical, -1)
    else:
        physical = tl.where(known, page, -1)
    return physical


@triton.jit(do_not_specialize=["seqlen_q", "group_size", "kv_heads", "max_pages", "num_physical"])
def _page_scores_fwd_kernel(
    p_q,
    p_low,
    p_high,
    p_scores,  # (B, Hk, P) fp32
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    seqlen_q,
    group_size,
    kv_heads,
    max_pages,
    scale,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_sb,
    stride_sp,
    stride_sh,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    MEAN: tl.constexpr,  # low is high
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_list, i_tile = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_list // kv_heads, i_list % kv_heads
    stop_page = tl.cdiv(tl.load(p_seqused + i_b), PAGE)
    first_page = first_key(p_leftpad, i_b, HAS_LEFTPAD) // PAGE
    pages = i_tile * BLOCK_P + tl.arange(0, BLOCK_P)
    if (i_tile * BLOCK_P < stop_page) & ((i_tile + 1) * BLOCK_P > first_page):
        o_d, o_r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
        known = (pages >= first_page) & (pages < stop_page) & (pages < max_pages)
        physical = physical_pages(p_table, table_stride, i_b, pages, known, num_physical, PAGED)
        p_rows = i_b.to(tl.int64) * stride_sb + physical.to(tl.int64)[:, None] * stride_sp + i_h * stride_sh
        inside = (physical >= 0)[:, None] & (o_d < D)[None, :]
        b_high = tl.load(p_high + p_rows + o_d[None, :], mask=inside, other=0.0).to(tl.float32)  # [BLOCK_P, BLOCK_D]
        up = tl.zeros([BLOCK_D], tl.float32)
        down = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, seqlen_q * group_size, BLOCK_R):
            row = start + o_r
            p_row = p_q + i_b.to(tl.int64) * stride_qb + (row // group_size).to(tl.int64) * stride_qn
            p_row += (i_h * group_size + row % group_size).to(tl.int64) * stride_qh
            mask = (row < seqlen_q * group_size)[:, None] & (o_d < D)[None, :]
            b_q = tl.load(p_row[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32) * scale
            up += tl.sum(tl.maximum(b_q, 0.0), 0)
            down += tl.sum(tl.minimum(b_q, 0.0), 0)
        if MEAN:
            scores = tl.sum(b_high * (up + down)[None, :], 1)
        else:
            b_low = tl.load(p_low + p_rows + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
            scores = tl.sum(b_high * up[None, :] + b_low * down[None, :], 1)
        tl.store(p_scores + i_list.to(tl.int64) * max_pages + pages, scores, mask=pages < max_pages)


@triton.jit(do_not_specialize=["seqlen_q", "kv_heads", "max_pages", "num_physical", "sinks", "window", "slots"])
def _choose_pages_fwd_kernel(
    p_scores,  # (B, Hk, P) fp32
    p_wanted,  # (2, Hk) fp32
    p_chosen,  # (B, Hk, S) int32
    p_counts,  # (B, Hk) int32
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    seqlen_q,
    kv_heads,
    max_pages,
    sinks,
    window,
    slots,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_list = tl.program_id(0)
    i_b, i_h = i_list // kv_heads, i_list % kv_heads
    seqused = tl.load(p_seqused + i_b)
    leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    first_page, stop_page = leftpad // PAGE, tl.cdiv(seqused, PAGE)
    pages = tl.arange(0, BLOCK_P)
    known = (pages >= first_page) & (pages < stop_page) & (pages < max_pages)
    exists = physical_pages(p_table, table_stride, i_b, pages, known, num_physical, PAGED) >= 0
    sinks_stop = tl.where(sinks > 0, leftpad + sinks, 0)
    forced = exists & ((pages * PAGE < sinks_stop) | ((pages + 1) * PAGE > seqused - (seqlen_q + window - 1)))
    optional = exists & (forced == 0)

    share = tl.load(p_wanted + kv_heads + i_h) * tl.maximum(stop_page - first_page, 0).to(tl.float32)
    wanted = (tl.load(p_wanted + i_h) + tl.ceil(share)).to(tl.int32)
    wanted = tl.minimum(wanted, tl.sum(optional.to(tl.int32), 0))
    scores = tl.load(p_scores + i_list.to(tl.int64) * max_pages + pages, mask=optional, other=0.0) + 0.0
    keys = ordered_bits(scores)
    keys = tl.where(optional, keys, 0)
    least = tl.full([], 0, tl.uint32)  # the key of the last that is wanted, bit by bit
    for i_bit in tl.static_range(32):
        raised = least | (1 << (31 - i_bit))
        least = tl.where(tl.sum((keys >= raised).to(tl.int32), 0) >= wanted, raised, least)
    above = optional & (keys > least)
    equal = optional & (keys == least)
    left = wanted - tl.sum(above.to(tl.int32), 0)
    chosen = forced | above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))

    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    count = tl.minimum(tl.sum(chosen.to(tl.int32), 0), slots)
    p_list = p_chosen + i_list.to(tl.int64) * slots
    tl.store(p_list + place, pages, mask=chosen & (place < slots))
    o_s = tl.arange(0, BLOCK_S)
    tl.store(p_list + o_s, -1, mask=(o_s >= count) & (o_s < slots))
    tl.store(p_counts + i_list, count)


@triton.jit(do_not_specialize=["kv_heads", "num_physical", "first_new", "pages_per_entry"])
def _summarize_pages_kernel(
    p_k,
    p_low,
    p_high,
    p_k_scale,
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    kv_heads,
    new_tokens,  # -1 for all
    pages_per_entry,
    max_pages,
    bound,
    stride_kb,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_kscale_b,
    stride_kscale_p,
    stride_kscale_h,
    stride_sb,
    stride_sp,
    stride_sh,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    MEAN: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_entry, i_h = tl.program_id(0), tl.program_id(1)
    i_b = i_entry // pages_per_entry
    seqused = tl.load(p_seqused + i_b)
    leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    first_page = leftpad // PAGE
    if new_tokens >= 0:
        first_page = tl.maximum(first_page, tl.maximum(seqused - new_tokens, 0) // PAGE)
    page = first_page + i_entry % pages_per_entry
    start, stop = tl.maximum(page * PAGE, leftpad), tl.minimum((page + 1) * PAGE, seqused)
    known = (start < stop) & (page < max_pages)
    physical = physical_pages(p_table, table_stride, i_b, page, known, num_physical, PAGED).to(tl.int64)
    if physical >= 0:
        o_d, o_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_D], tl.float32)
        low = tl.full([BLOCK_D], float("inf"), tl.float32)
        high = tl.full([BLOCK_D], float("-inf"), tl.float32)
        p_page = p_k + i_b.to(tl.int64) * stride_kb + physical * stride_kp + i_h.to(tl.int64) * stride_kh
        for first in range(0, PAGE, BLOCK_N):
            position = page * PAGE + first + o_n
            inside = ((position >= start) & (position < stop))[:, None]
            p_rows = p_page + (first + o_n).to(tl.int64)[:, None] * stride_kn + o_d[None, :]
            b_k = tl.load(p_rows, mask=inside & (o_d < D)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(b_k, 0)
            low = tl.minimum(low, tl.min(tl.where(inside, b_k, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(inside, b_k, float("-inf")), 0))
        if SCALED:
            p_scale = p_k_scale + i_b.to(tl.int64) * stride_kscale_b + physical * stride_kscale_p
            k_scale = tl.load(p_scale + i_h * stride_kscale_h)
            total, low, high = total * k_scale, low * k_scale, high * k_scale
        mean = total / (stop - start).to(tl.float32)
        at = i_b.to(tl.int64) * stride_sb + physical * stride_sp + i_h.to(tl.int64) * stride_sh + o_d
        tl.store(p_low + at, (mean + bound * (low - mean)).to(p_low.dtype.element_ty), mask=o_d < D)
        if MEAN == 0:
            tl.store(p_high + at, (mean + bound * (high - mean)).to(p_high.dtype.element_ty), mask=o_d < D)


def select_pages(
    q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.decode`."""
    assert cache.summaries is not None, "checked before"
    lists, max_pages = (cache.batch, cache.kv_heads), cache.max_pages
    chosen = torch.empty(*lists, slots, dtype=torch.int32, device=q.device)
    counts = torch.empty(lists, dtype=torch.int32, device=q.device)
    if counts.numel() == 0:
        return chosen, counts
    q = unit_stride(q)
    scores = torch.empty(*lists, max_pages, dtype=torch.float32, device=q.device)
    rows = q.shape[1] * (q.shape[2] // cache.kv_heads)
    own = table_arguments(cache)
    _page_scores_fwd_kernel[(counts.numel(), triton.cdiv(max_pages, PAGES_PER_PROGRAM))](
        q,
        cache.summaries.low,
        cache.summaries.high,
        scores,
        **own,
        seqlen_q=q.shape[1],
        group_size=q.shape[2] // cache.kv_heads,
        kv_heads=cache.kv_heads,
        max_pages=max_pages,
        scale=scale,
        **strides("q", q),
        **page_strides("s", cache.summaries.strides()),
        MEAN=cache.summaries.low is cache.summaries.high,
        PAGE=cache.page_size,
        D=cache.head_dim,
        BLOCK_D=padded(cache.head_dim),
        BLOCK_R=min(QUERY_ROWS, triton.next_power_of_2(rows)),
        BLOCK_P=PAGES_PER_PROGRAM,
        num_warps=4,
    )
    block = max(16, triton.next_power_of_2(max_pages))
    _choose_pages_fwd_kernel[(counts.numel(),)](
        scores,
        wanted,
        chosen,
        counts,
        **own,
        seqlen_q=q.shape[1],
        kv_heads=cache.kv_heads,
        max_pages=max_pages,
        sinks=sinks,
        window=window,
        slots=slots,
        PAGE=cache.page_size,
        BLOCK_P=block,
        BLOCK_S=triton.next_power_of_2(max(1, slots)),
        num_warps=min(16, max(1, block // 512)),
    )
    return chosen, counts


def summarize_pages(cache: PagedCache, summaries: PageSummaries, new_tokens: int | None) -> None:
    """As `kernels.reference.decode`."""
    per_entry = cache.max_pages
    if new_tokens is not None:
        per_entry = min(per_entry, (new_tokens + cache.page_size - 2) // cache.page_size + 1 if new_tokens else 0)
    if cache.batch * per_entry * cache.kv_heads == 0:
        return
    _summarize_pages_kernel[(cache.batch * per_entry, cache.kv_heads)](
        cache.k,
        summaries.low,
        summaries.high,
        cache.k_scale if cache.k_scale is not None else cache.k,
        **table_arguments(cache),
        kv_heads=cache.kv_heads,
        new_tokens=-1 if new_tokens is None else new_tokens,
        pages_per_entry=per_entry,
        max_pages=cache.max_pages,
        bound=summaries.bound,
        **page_strides("k", cache.strides(cache.k), token=True),
        **scale_strides("kscale", cache, cache.k_scale),
        **page_strides("s", summaries.strides()),
        SCALED=cache.k_scale is not None,
        MEAN=summaries.low is summaries.high,
        PAGE=cache.page_size,
        D=cache.head_dim,
        BLOCK_D=padded(cache.head_dim),
        BLOCK_N=min(cache.page_size, KEY_ROWS),
        num_warps=4,
    )


def table_arguments(cache: PagedCache) -> dict[str, object]:
    """Where pages lie and how long sequences are, as the kernels name them."""
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


def page_strides(name: str, of: PageStrides, token: bool = False) -> dict[str, int]:
    """Strides of batch, page and head, and of tokens where asked for."""
    found = {f"stride_{name}b": of.batch, f"stride_{name}p": of.page, f"stride_{name}h": of.head}
    return {**found, f"stride_{name}n": of.token} if token else found


def scale_strides(name: str, cache: PagedCache, scale: Tensor | None) -> dict[str, int]:
    """Strides of a scale by batch, page and head; zeros where there is none."""
    of = PageStrides(0, 0, 0, 0) if scale is None else cache.scale_strides(scale)
    return {f"stride_{name}_b": of.batch, f"stride_{name}_p": of.page, f"stride_{name}_h": of.head}
