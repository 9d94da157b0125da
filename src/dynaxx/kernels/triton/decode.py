# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Decoding in Triton: split-KV attention over listed pages, and the merge of its parts.

All lists together are one row of pages. Each program takes an even piece of that row, whatever list its pages are of,
so one long sequence among short ones keeps every multiprocessor busy. Pieces follow from the counts of the lists, which
are read on the device: grids depend on sizes alone, and a captured graph serves every length.

Shapes: B batch, N queries of a step, Hq / Hk query and kv heads, D / E head_dim of q, k and of v, S slots. A list is
one (batch entry, kv head); its rows are the queries of its group, N * Hq / Hk of them. A part is what one program found
of one list; program g's part of list i is number g + i, since each step along the row raises one of both.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.launch import positive_scale, strides, unit_stride
from dynaxx.kernels.triton.pages import (
    first_key,
    page_strides,
    physical_pages,
    scale_strides,
    select_pages,
    summarize_pages,
    table_arguments,
)
from dynaxx.kernels.triton.primitives import LOG2E
from dynaxx.layout.paging import PagedCache

__all__ = ["attend_pages", "select_pages", "summarize_pages"]

KEYS_PER_TILE = 64
NUM_WARPS, NUM_STAGES = 4, 3
PROGRAMS_PER_PROCESSOR = 2
MOST_ROWS = 64
PARTS_AT_ONCE = 8
INTERPRETED_PROGRAMS = 5  # sometimes more than there are pages


@triton.jit
def _count_pages_kernel(
    p_pages,  # (B, Hk, S) int32, as given
    p_listed,  # the same, those that can be read first
    p_counts,  # (B, Hk) int32
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    kv_heads,
    max_pages,
    slots,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    ALL: tl.constexpr,  # every page of a sequence, and no lists
    PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_list = tl.program_id(0)
    i_b = i_list // kv_heads
    first_page = first_key(p_leftpad, i_b, HAS_LEFTPAD) // PAGE
    stop_page = tl.minimum(tl.cdiv(tl.load(p_seqused + i_b), PAGE), max_pages)
    count = tl.maximum(stop_page - first_page, 0)
    if ALL == 0:
        o_s = tl.arange(0, BLOCK_S)
        at = i_list.to(tl.int64) * slots
        page = tl.load(p_pages + at + o_s, mask=o_s < slots, other=-1)
        known = (page >= first_page) & (page < stop_page)
        there = physical_pages(p_table, table_stride, i_b, page, known, num_physical, PAGED) >= 0
        tl.store(p_listed + at + tl.cumsum(there.to(tl.int32), 0) - 1, page, mask=there)
        count = tl.sum(there.to(tl.int32), 0)
    tl.store(p_counts + i_list, count)


@triton.jit
def _list_bounds(p_counts, lists, BLOCK_L: tl.constexpr):
    """Counts of all lists, where each ends in the row of all pages, and the length of the row."""
    o_l = tl.arange(0, BLOCK_L)
    counts = tl.load(p_counts + o_l, mask=o_l < lists, other=0)
    return counts, tl.cumsum(counts, 0), tl.sum(counts, 0)


@triton.jit
def _load_keys(p_base, p_rows, inside, o_d, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """[len(p_rows), BLOCK_DIM] rows of a cache; zero where not inside."""
    if DIM < BLOCK_DIM:
        rows = tl.load(p_base + p_rows[:, None] + o_d[None, :], mask=inside[:, None] & (o_d < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(p_base + p_rows[:, None] + o_d[None, :], mask=inside[:, None], other=0.0)
    return rows


@triton.jit(do_not_specialize=["seqlen_q", "group_size", "kv_heads", "max_pages", "num_physical", "slots", "lists"])
def _decode_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_acc,  # (parts, rows, E) fp32
    p_state,  # (parts, rows, 2) fp32: largest score, sum of weights
    p_pages,  # (B, Hk, S) int32: logical pages, those to read first
    p_counts,  # (B, Hk) int32
    p_k_scale,
    p_v_scale,
    p_table,
    p_seqused,
    p_leftpad,
    table_stride,
    num_physical,
    seqlen_q,
    group_size,
    kv_heads,
    lists,
    slots,
    scale,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_kscale_b,
    stride_kscale_p,
    stride_kscale_h,
    stride_vscale_b,
    stride_vscale_p,
    stride_vscale_h,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    ALL: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PRECISION: tl.constexpr,
):
    PAGES: tl.constexpr = (BLOCK_N + PAGE - 1) // PAGE  # pages per tile
    TILES: tl.constexpr = (PAGE + BLOCK_N - 1) // BLOCK_N  # tiles per page
    i_program, i_rows = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_programs = tl.num_programs(0)
    rows = seqlen_q * group_size
    o_m, o_n, o_d, o_e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    o_l = tl.arange(0, BLOCK_L)
    row = i_rows * BLOCK_M + o_m
    counts, ends, total = _list_bounds(p_counts, lists, BLOCK_L)
    pieces = tl.minimum(num_programs, tl.maximum(total, 1))  # none is empty
    at = (tl.minimum(i_program, pieces) * total // pieces).to(tl.int32)
    last = (tl.minimum(i_program + 1, pieces) * total // pieces).to(tl.int32)
    while at < last:
        i_list = tl.sum((ends <= at).to(tl.int32), 0)
        list_start = tl.sum(tl.where(o_l < i_list, counts, 0), 0)
        stop = tl.minimum(last, list_start + tl.sum(tl.where(o_l == i_list, counts, 0), 0))
        i_b, i_h = (i_list // kv_heads).to(tl.int64), (i_list % kv_heads).to(tl.int64)
        seqused = tl.load(p_seqused + i_b)
        leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
        first_page = leftpad // PAGE
        p_row = p_q + i_b * stride_qb + (row // group_size).to(tl.int64)[:, None] * stride_qn
        p_row += (i_h * group_size + row % group_size)[:, None] * stride_qh
        b_q = tl.load(p_row + o_d[None, :], mask=(row < rows)[:, None] & (o_d < D)[None, :], other=0.0)
        own_position = seqused - seqlen_q + row // group_size  # [BLOCK_M]
        p_list = p_pages + i_list.to(tl.int64) * slots
        first_slot = at - list_start
        num_slots = stop - at

        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for i_tile in range(0, tl.cdiv(num_slots, PAGES) * TILES):
            if PAGES == 1:
                slot = i_tile // TILES  # a scalar: the tile is a part of one page
                offset = (i_tile % TILES) * BLOCK_N + o_n
            else:
                slot = i_tile * PAGES + o_n // PAGE
                offset = o_n % PAGE
            listed = slot < num_slots
            page = first_page + first_slot + slot
            if ALL == 0:
                page = tl.load(p_list + first_slot + slot, mask=listed, other=-1)
            physical = physical_pages(p_table, table_stride, i_b, page, listed & (page >= 0), num_physical, PAGED)
            position = tl.where(physical >= 0, page * PAGE, seqused) + offset  # [BLOCK_N], past the end if not there
            inside = (position >= leftpad) & (position < seqused)
            physical = physical.to(tl.int64)
            k_rows = i_b * stride_kb + physical * stride_kp + offset.to(tl.int64) * stride_kn + i_h * stride_kh
            v_rows = i_b * stride_vb + physical * stride_vp + offset.to(tl.int64) * stride_vn + i_h * stride_vh
            b_k = _load_keys(p_k, k_rows, inside, o_d, D, BLOCK_D).to(b_q.dtype)
            b_v = _load_keys(p_v, v_rows, inside, o_e, E, BLOCK_E).to(b_q.dtype)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if SCALED:
                k_at = i_b * stride_kscale_b + physical * stride_kscale_p + i_h * stride_kscale_h + o_n * 0
                v_at = i_b * stride_vscale_b + physical * stride_vscale_p + i_h * stride_vscale_h + o_n * 0
                k_scale = tl.load(p_k_scale + k_at, mask=inside, other=0.0)  # [BLOCK_N]
                v_scale = tl.load(p_v_scale + v_at, mask=inside, other=0.0)
                scores = scores * k_scale[None, :]
            visible = inside[None, :] & (position[None, :] <= own_position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2((row_max - shift) * (scale * LOG2E))
            weights = tl.exp2((scores - shift[:, None]) * (scale * LOG2E))
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            row_max = new_max
            if SCALED:
                weights = weights * v_scale[None, :]
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=PRECISION)

        part = (i_program + i_list) * rows + row
        tl.store(p_acc + part[:, None] * E + o_e[None, :], acc, mask=(row < rows)[:, None] & (o_e < E)[None, :])
        tl.store(p_state + part * 2, row_max, mask=row < rows)
        tl.store(p_state + part * 2 + 1, row_sum, mask=row < rows)
        at = stop


@triton.jit(do_not_specialize=["seqlen_q", "group_size", "kv_heads", "lists", "num_programs"])
def _merge_parts_kernel(
    p_acc,
    p_state,
    p_counts,
    p_out,  # (B, N, Hq, E) contiguous
    p_lse,  # (B, Hq, N) contiguous, fp32
    seqlen_q,
    group_size,
    kv_heads,
    lists,
    num_programs,
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    i_list, i_row = tl.program_id(0), tl.program_id(1)
    rows = seqlen_q * group_size
    counts, ends, total = _list_bounds(p_counts, lists, BLOCK_L)
    o_l, o_g, o_e = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    count = tl.sum(tl.where(o_l == i_list, counts, 0), 0)
    stop = tl.sum(tl.where(o_l == i_list, ends, 0), 0).to(tl.int64)
    wide = tl.maximum(total, 1).to(tl.int64)
    pieces = tl.minimum(num_programs, wide)
    first = ((stop - count + 1) * pieces - 1) // wide  # the program whose piece holds the list's first page
    last = (stop * pieces - 1) // wide
    acc = tl.zeros([BLOCK_E], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total_weight = tl.full([], 0.0, tl.float32)
    if count > 0:
        for start in range(first, last + 1, BLOCK_G):
            part = (start + o_g + i_list) * rows + i_row
            known = start + o_g <= last
            largest = tl.load(p_state + part * 2, mask=known, other=float("-inf"))
            sums = tl.load(p_state + part * 2 + 1, mask=known, other=0.0)
            mask = known[:, None] & (o_e < E)[None, :]
            found = tl.load(p_acc + part[:, None] * E + o_e[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(largest, 0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2((top - shift) * (scale * LOG2E))
            weights = tl.exp2((largest - shift) * (scale * LOG2E))
            acc = acc * rescale + tl.sum(found * weights[:, None], 0)
            total_weight = total_weight * rescale + tl.sum(sums * weights, 0)
            top = new_top
    empty = total_weight == 0
    total_weight = tl.where(empty, 1.0, total_weight)
    i_b, i_n = i_list // kv_heads, i_row // group_size
    i_head = (i_list % kv_heads) * group_size + i_row % group_size
    q_heads = kv_heads * group_size
    p_out += ((i_b * seqlen_q + i_n).to(tl.int64) * q_heads + i_head) * E
    tl.store(p_out + o_e, (acc / total_weight).to(p_out.dtype.element_ty), mask=o_e < E)
    lse = tl.where(empty, float("-inf"), top * scale + tl.log(total_weight))
    tl.store(p_lse + (i_b * q_heads + i_head).to(tl.int64) * seqlen_q + i_n, lse)


def attend_pages(
    q: Tensor, cache: PagedCache, block_indices: Tensor | None, counts: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.decode`; 8-bit keys are multiplied in q's dtype, fp32 in full fp32."""
    batch, seqlen_q, q_heads, _ = q.shape
    out = q.new_empty(batch, seqlen_q, q_heads, cache.head_dim_v)
    lse = q.new_empty(batch, q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q = q if cache.k.dtype.itemsize == 1 else q.to(torch.promote_types(q.dtype, cache.k.dtype))
    q, scale = positive_scale(unit_stride(q), scale)
    group_size = q_heads // cache.kv_heads
    rows, lists = seqlen_q * group_size, batch * cache.kv_heads
    slots = cache.max_pages if block_indices is None else block_indices.shape[2]
    if counts is None:
        block_indices, counts = _listed(cache, block_indices)
    tile = KEYS_PER_TILE if q.dtype != torch.float32 else 32
    tile = max(16, min(tile, cache.page_size)) if cache.page_size > tile else tile
    programs = max(1, min(_most_programs(q.device), lists * triton.cdiv(slots * cache.page_size, tile)))
    acc = q.new_empty(programs + lists, rows, cache.head_dim_v, dtype=torch.float32)
    state = q.new_empty(programs + lists, rows, 2, dtype=torch.float32)
    block_m = max(16, min(MOST_ROWS, triton.next_power_of_2(rows)))
    scaled = cache.k_scale is not None
    _decode_fwd_kernel[(programs, triton.cdiv(rows, block_m))](
        q,
        cache.k,
        cache.v,
        acc,
        state,
        counts if block_indices is None else block_indices,
        counts,
        cache.k_scale if scaled else counts,
        cache.v_scale if scaled else counts,
        **table_arguments(cache),
        seqlen_q=seqlen_q,
        group_size=group_size,
        kv_heads=cache.kv_heads,
        lists=lists,
        slots=slots,
        scale=scale,
        **strides("q", q),
        **page_strides("k", cache.strides(cache.k), token=True),
        **page_strides("v", cache.strides(cache.v), token=True),
        **scale_strides("kscale", cache, cache.k_scale),
        **scale_strides("vscale", cache, cache.v_scale),
        SCALED=scaled,
        ALL=block_indices is None,
        PAGE=cache.page_size,
        D=cache.head_dim,
        E=cache.head_dim_v,
        BLOCK_D=padded(cache.head_dim),
        BLOCK_E=padded(cache.head_dim_v),
        BLOCK_M=block_m,
        BLOCK_N=tile,
        BLOCK_L=triton.next_power_of_2(lists),
        PRECISION="ieee",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES if q.dtype != torch.float32 else 1,
    )
    _merge_parts_kernel[(lists, rows)](
        acc,
        state,
        counts,
        out,
        lse,
        seqlen_q=seqlen_q,
        group_size=group_size,
        kv_heads=cache.kv_heads,
        lists=lists,
        num_programs=programs,
        scale=scale,
        E=cache.head_dim_v,
        BLOCK_E=padded(cache.head_dim_v),
        BLOCK_L=triton.next_power_of_2(lists),
        BLOCK_G=PARTS_AT_ONCE,
        num_warps=1,
    )
    return out, lse


def _listed(cache: PagedCache, block_indices: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Given pages with those that can be read first, and how many these are."""
    counts = torch.empty(cache.batch, cache.kv_heads, dtype=torch.int32, device=cache.device)
    given = counts if block_indices is None else block_indices.contiguous()
    slots = 0 if block_indices is None else block_indices.shape[2]
    listed = torch.empty_like(given)
    _count_pages_kernel[(counts.numel(),)](
        given,
        listed,
        counts,
        **table_arguments(cache),
        kv_heads=cache.kv_heads,
        max_pages=cache.max_pages,
        slots=slots,
        ALL=block_indices is None,
        PAGE=cache.page_size,
        BLOCK_S=triton.next_power_of_2(max(1, slots)),
    )
    return (None if block_indices is None else listed), counts


def _most_programs(device: torch.device) -> int:
    return INTERPRETED_PROGRAMS if device.type != "cuda" else PROGRAMS_PER_PROCESSOR * _processors(device)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
