# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Choosing pages in Triton: scores from summaries, and the best of them without sorting.

Where there are enough lists, one program scores the pages of a list and chooses among them: one launch. Where there are
few, many programs score the pages of each, and the same kernel is launched again to choose.

Shapes: B batch, N queries of a step, Hq / Hk query and kv heads, D head_dim, P logical pages, S slots. A list is one
(batch entry, kv head).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dynaxx.kernels.triton.best_pages import best_pages
from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.eight_bits import nearest, power_below
from dynaxx.kernels.triton.launch import overlap, processors, strides, unit_stride
from dynaxx.kernels.triton.light import light_launch
from dynaxx.kernels.triton.pages import first_key, page_strides, physical_pages, table_arguments
from dynaxx.kernels.triton.support import interpreted
from dynaxx.layout.paging import PagedCache

TILE_BYTES, MOST_PAGES = 16384, 128  # of low and of high, each
QUERY_ROWS = 64
TILES_AHEAD = 2
WARPS = 4


@triton.jit
def _query_bounds(
    p_q, stride_qn, stride_qh, rows, group_size, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Sums over a list's queries of relu(q) and of min(q, 0), each [BLOCK_D]."""
    o_d, o_r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    up = tl.zeros([BLOCK_D], tl.float32)
    down = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = start + o_r
        p_row = p_q + (row // group_size).to(tl.int64) * stride_qn + (row % group_size).to(tl.int64) * stride_qh
        mask = (row < rows)[:, None] & (o_d < D)[None, :]
        b_q = tl.load(p_row[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32) * scale
        up += tl.sum(tl.maximum(b_q, 0.0), 0)
        down += tl.sum(tl.minimum(b_q, 0.0), 0)
    return up, down


@triton.jit
def _thirds(x):
    """[len(x), 16] bf16: fp32 values as three that add up to them, and zeros."""
    o_c = tl.arange(0, 16)[None, :]
    first = x.to(tl.bfloat16).to(tl.float32)
    second = (x - first).to(tl.bfloat16).to(tl.float32)
    third = x - first - second
    columns = tl.where(o_c == 0, first[:, None], tl.where(o_c == 1, second[:, None], third[:, None]))
    return tl.where(o_c < 3, columns, 0.0).to(tl.bfloat16)


@triton.jit
def _digits(x):
    """[len(x), 16] int8: values in (-2, 2) as three digits to the base 128, the first worth 1 / 32; and zeros."""
    o_c = tl.arange(0, 16)
    y = x[:, None] * tl.where(o_c == 0, 2.0**5, tl.where(o_c == 1, 2.0**12, tl.where(o_c == 2, 2.0**19, 0.0)))[None, :]
    return (nearest(y) - 128 * nearest(y / 128)).to(tl.int8)


@triton.jit
def _products(tile, x, DOT: tl.constexpr):
    """tile @ x; by the matrix unit, without loss, where x comes in parts, a column for each."""
    return tl.dot(tile, x) if DOT else tl.sum(tile.to(tl.float32) * x[None, :], 1)


@triton.jit
def _of_digits(products):
    """What int32 products with `_digits` amount to."""
    o_c = tl.arange(0, 16)
    worth = tl.where(o_c == 0, 2.0**-5, tl.where(o_c == 1, 2.0**-12, 2.0**-19))
    return tl.sum(products.to(tl.float32) * worth[None, :], 1)


@triton.jit
def _fetch(p_rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Bring rows to the L2 cache, so that they come while something else is waited for."""
    SIZE: tl.constexpr = p_rows.dtype.element_ty.primitive_bitwidth // 8
    o_d = tl.arange(0, BLOCK_D * SIZE // 32) * (32 // SIZE)  # where sectors begin
    inside = inside[:, None] & (o_d < D)[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [(p_rows[:, None] + o_d[None, :]).to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@light_launch
@triton.jit(
    do_not_specialize=["seqlen_q", "group_size", "kv_heads", "max_pages", "num_physical", "sinks", "window", "slots"]
)
def _select_pages_fwd_kernel(
    p_q,
    p_low,
    p_high,
    p_scale,
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
    group_size,
    kv_heads,
    max_pages,
    sinks,
    window,
    slots,
    scale,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_sb,
    stride_sp,
    stride_sh,
    stride_scale_b,
    stride_scale_p,
    stride_scale_h,
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
    SCALED: tl.constexpr,
    SCORE: tl.constexpr,
    CHOOSE: tl.constexpr,
    MEAN: tl.constexpr,  # low is high
    DOT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and SCORE:
        gdc_wait()
        gdc_launch_dependents()
    i_list = tl.program_id(0)
    i_b, i_h = i_list // kv_heads, i_list % kv_heads
    seqused = tl.load(p_seqused + i_b)
    leftpad = first_key(p_leftpad, i_b, HAS_LEFTPAD)
    first_page, stop_page = leftpad // PAGE, tl.minimum(tl.cdiv(seqused, PAGE), max_pages)
    fixed, share = tl.load(p_wanted + i_h), tl.load(p_wanted + kv_heads + i_h)
    p_scores += i_list.to(tl.int64) * max_pages
    if SCORE:
        o_d = tl.arange(0, BLOCK_D)
        at = i_b.to(tl.int64) * stride_sb + i_h.to(tl.int64) * stride_sh
        if PDL:
            page = (first_page // TILE + tl.program_id(1)) * TILE + tl.arange(0, TILE)
            known = (page >= first_page) & (page < stop_page)
            physical = physical_pages(p_table, table_stride, i_b, page, known, num_physical, PAGED)
            first_rows = at + physical.to(tl.int64) * stride_sp
            _fetch(p_high + first_rows, physical >= 0, D, BLOCK_D)
            if MEAN == 0:
                _fetch(p_low + first_rows, physical >= 0, D, BLOCK_D)
        p_q += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * group_size * stride_qh
        up, down = _query_bounds(
            p_q, stride_qn, stride_qh, seqlen_q * group_size, group_size, scale, D, BLOCK_D, BLOCK_R
        )
        if MEAN:
            up += down
        unit = 1.0
        if DOT and SCALED:
            unit = power_below(tl.max(tl.maximum(tl.abs(up), tl.abs(down)), 0))
            up, down = _digits(up / unit), _digits(down / unit)
        elif DOT:
            up, down = _thirds(up), _thirds(down)
        p_scale += i_b.to(tl.int64) * stride_scale_b + i_h.to(tl.int64) * stride_scale_h
        for i_tile in tl.range(
            first_page // TILE + tl.program_id(1), tl.cdiv(stop_page, TILE), tl.num_programs(1), num_stages=STAGES
        ):
            page = i_tile * TILE + tl.arange(0, TILE)
            known = (page >= first_page) & (page < stop_page)
            physical = physical_pages(p_table, table_stride, i_b, page, known, num_physical, PAGED)
            rows = at + physical.to(tl.int64)[:, None] * stride_sp + o_d[None, :]
            inside = (physical >= 0)[:, None] & (o_d < D)[None, :]
            score = _products(tl.load(p_high + rows, mask=inside, other=0), up, DOT)
            if MEAN == 0:
                score += _products(tl.load(p_low + rows, mask=inside, other=0), down, DOT)
            if SCALED:
                score = (_of_digits(score) if DOT else score) * unit
                score *= tl.load(p_scale + physical.to(tl.int64) * stride_scale_p, mask=physical >= 0, other=0.0)
            elif DOT:
                score = tl.sum(score, 1)
            tl.store(p_scores + page, score, mask=known)
    if CHOOSE:
        pages = tl.arange(0, BLOCK_P)
        known = (pages >= first_page) & (pages < stop_page)
        exists = physical_pages(p_table, table_stride, i_b, pages, known, num_physical, PAGED) >= 0
        sinks_stop = tl.where(sinks > 0, leftpad + sinks, 0)
        forced = exists & ((pages * PAGE < sinks_stop) | ((pages + 1) * PAGE > seqused - (seqlen_q + window - 1)))
        optional = exists & (forced == 0)
        wanted = (fixed + tl.ceil(share * tl.maximum(stop_page - first_page, 0).to(tl.float32))).to(tl.int32)
        if SCORE:
            tl.debug_barrier()  # scores that other threads of this program stored
        elif PDL:  # what was read so far is older than the kernel of the scores, which waited for it
            gdc_wait()
            gdc_launch_dependents()
        scores = tl.load(p_scores + pages, mask=optional, other=0.0)
        chosen, count = best_pages(scores, forced, optional, wanted)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        count = tl.minimum(count, slots)
        p_list = p_chosen + i_list.to(tl.int64) * slots
        tl.store(p_list + place, pages, mask=chosen & (place < slots))
        o_s = tl.arange(0, BLOCK_S)
        tl.store(p_list + o_s, -1, mask=(o_s >= count) & (o_s < slots))
        tl.store(p_counts + i_list, count)


def select_pages(
    q: Tensor, cache: PagedCache, wanted: Tensor, sinks: int, window: int, slots: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.decode`."""
    assert cache.summaries is not None, "checked before"
    lists, max_pages = cache.batch * cache.kv_heads, cache.max_pages
    chosen = torch.empty(cache.batch, cache.kv_heads, slots, dtype=torch.int32, device=q.device)
    counts = torch.empty(cache.batch, cache.kv_heads, dtype=torch.int32, device=q.device)
    if lists == 0:
        return chosen, counts
    q = unit_stride(q)
    scores = torch.empty(lists, max_pages, dtype=torch.float32, device=q.device)
    group_size = q.shape[2] // cache.kv_heads
    block = max(16, triton.next_power_of_2(max_pages))
    rounded = cache.summaries.scale is not None
    block_d = max(32 if rounded else 16, padded(cache.head_dim))  # 32: of the matrix unit in int8
    tile = max(16, min(MOST_PAGES, block, TILE_BYTES // (block_d * cache.summaries.low.dtype.itemsize)))
    tiles = triton.cdiv(max_pages, tile)
    fused = tiles == 1 or 2 * lists >= processors(q.device)
    for programs, score, choose in [(1, True, True)] if fused else [(tiles, True, False), (1, False, True)]:
        _select_pages_fwd_kernel[(lists, programs)](
            q,
            cache.summaries.low,
            cache.summaries.high,
            cache.summaries.low if cache.summaries.scale is None else cache.summaries.scale,
            scores,
            wanted,
            chosen,
            counts,
            **table_arguments(cache),
            seqlen_q=q.shape[1],
            group_size=group_size,
            kv_heads=cache.kv_heads,
            max_pages=max_pages,
            sinks=sinks,
            window=window,
            slots=slots,
            scale=scale,
            **strides("q", q),
            **page_strides("s", cache.summaries.strides()),
            **page_strides("scale_", cache.summaries.scale_strides()),
            SCALED=rounded,
            SCORE=score,
            CHOOSE=choose,
            MEAN=cache.summaries.low is cache.summaries.high,
            DOT=cache.summaries.low.dtype in (torch.bfloat16, torch.int8) and not interpreted(),
            PAGE=cache.page_size,
            D=cache.head_dim,
            BLOCK_D=block_d,
            BLOCK_R=min(QUERY_ROWS, triton.next_power_of_2(q.shape[1] * group_size)),
            TILE=tile,
            BLOCK_P=block,
            BLOCK_S=triton.next_power_of_2(max(1, slots)),
            STAGES=1 + TILES_AHEAD * (1 + cache.is_paged),  # where a page lies is loaded before its summary
            num_warps=min(16, max(4, block // 256)) if choose and not score else WARPS if fused else 4,
            **overlap(q.device),
        )
    return chosen, counts
