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

from dynaxx.kernels.triton.config import padded
from dynaxx.kernels.triton.launch import overlap, processors, strides, unit_stride
from dynaxx.kernels.triton.pages import first_key, page_strides, physical_pages, table_arguments
from dynaxx.kernels.triton.primitives import from_ordered_bits, ordered_bits
from dynaxx.kernels.triton.support import interpreted
from dynaxx.layout.paging import PagedCache

PAGES_PER_TILE = 64  # of 128 values in bf16; fewer of larger ones
QUERY_ROWS = 16
TILES_AHEAD = 2
WARPS = 4
PASSES_BY_VALUE = tl.constexpr(6)
MOST_KEY = tl.constexpr(0xFFFFFFF0)  # all but some NaN are below: no sum with a step of the search wraps around


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
    o_c = tl.arange(0, 16)
    first = x.to(tl.bfloat16)
    second = (x - first.to(tl.float32)).to(tl.bfloat16)
    third = (x - first.to(tl.float32) - second.to(tl.float32)).to(tl.bfloat16)
    columns = tl.where((o_c == 0)[None, :], first[:, None], second[:, None])
    columns = tl.where((o_c == 2)[None, :], third[:, None], columns)
    return tl.where((o_c < 3)[None, :], columns, 0.0).to(tl.bfloat16)


@triton.jit
def _products(tile, x, DOT: tl.constexpr):
    """tile @ x in fp32; by the matrix unit, without loss, where the tile is bf16 and x comes in thirds."""
    return tl.sum(tl.dot(tile, x), 1) if DOT else tl.sum(tile.to(tl.float32) * x[None, :], 1)


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _between(low, high, share):
    """A key in (low, high], by value: this share of the way from the score of low to that of high."""
    a, b = from_ordered_bits(low), from_ordered_bits(high)
    return tl.minimum(tl.maximum(ordered_bits(a + (b - a) * share), low + 1), high)


@triton.jit
def _count_and_range(n, m, least, most, n2, m2, least2, most2):
    return n + n2, m + m2, tl.minimum(least, least2), tl.maximum(most, most2)


@triton.jit
def _last_wanted(keys, low, high, reached, wanted):
    """A key that `wanted` of the keys reach, or more of them where the last ones are equal, and how many do.

    All `reached` keys are in [low, high). Each pass narrows that to about a quarter, of its values first, which are
    spread more evenly than their bits, then, for certain, of its bits. It stops where the count is right, most often
    after a few passes.
    """
    passes = 0
    while (high - low > 1) & (reached != wanted):
        step = tl.maximum((high - low) // 4, 1)
        by_value = passes < PASSES_BY_VALUE
        first = tl.where(by_value, _between(low, high, 0.25), low + step)
        second = tl.where(by_value, _between(low, high, 0.5), low + 2 * step)
        third = tl.where(by_value, _between(low, high, 0.75), low + 3 * step)
        counts = ((keys >= first).to(tl.int32), (keys >= second).to(tl.int32), (keys >= third).to(tl.int32))
        at_first, at_second, at_third = tl.reduce(counts, 0, _add3)
        above_first, above_second, above_third = at_first >= wanted, at_second >= wanted, at_third >= wanted
        high = tl.where(above_third, high, tl.where(above_second, third, tl.where(above_first, second, first)))
        low = tl.where(above_third, third, tl.where(above_second, second, tl.where(above_first, first, low)))
        reached = tl.where(above_second, at_second, tl.where(above_first, at_first, reached))
        reached = tl.where(above_third, at_third, reached)
        passes += 1
    return low, reached


@triton.jit
def _best_pages(scores, forced, optional, wanted):
    """The forced pages and the `wanted` best-scored optional ones, of equal scores the earlier ones; and how many."""
    keys = tl.where(optional, tl.minimum(ordered_bits(scores + 0.0), MOST_KEY), 0)
    facts = (optional.to(tl.int32), forced.to(tl.int32), tl.where(optional, keys, MOST_KEY), keys)
    num_optional, num_forced, low, high = tl.reduce(facts, 0, _count_and_range)
    wanted = tl.minimum(wanted, num_optional)
    least, reached = _last_wanted(keys, low, high + 1, num_optional, wanted)
    chosen = optional & (keys >= least)
    if reached != wanted:  # the last ones are equal, and some too many
        equal = optional & (keys == least)
        behind = tl.sum(equal.to(tl.int32), 0) - tl.cumsum(equal.to(tl.int32), 0)
        chosen = chosen & ((equal == 0) | (behind >= reached - wanted))
    return forced | chosen, num_forced + wanted


@triton.jit(
    do_not_specialize=["seqlen_q", "group_size", "kv_heads", "max_pages", "num_physical", "sinks", "window", "slots"]
)
def _select_pages_fwd_kernel(
    p_q,
    p_low,
    p_high,
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
    PAGED: tl.constexpr,
    HAS_LEFTPAD: tl.constexpr,
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
    if PDL:
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
        p_q += i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * group_size * stride_qh
        up, down = _query_bounds(
            p_q, stride_qn, stride_qh, seqlen_q * group_size, group_size, scale, D, BLOCK_D, BLOCK_R
        )
        if MEAN:
            up += down
        if DOT:
            up, down = _thirds(up), _thirds(down)
        o_d = tl.arange(0, BLOCK_D)
        at = i_b.to(tl.int64) * stride_sb + i_h.to(tl.int64) * stride_sh
        for i_tile in tl.range(
            first_page // TILE + tl.program_id(1), tl.cdiv(stop_page, TILE), tl.num_programs(1), num_stages=STAGES
        ):
            page = i_tile * TILE + tl.arange(0, TILE)
            known = (page >= first_page) & (page < stop_page)
            physical = physical_pages(p_table, table_stride, i_b, page, known, num_physical, PAGED)
            rows = at + physical.to(tl.int64)[:, None] * stride_sp + o_d[None, :]
            inside = (physical >= 0)[:, None] & (o_d < D)[None, :]
            score = _products(tl.load(p_high + rows, mask=inside, other=0.0), up, DOT)
            if MEAN == 0:
                score += _products(tl.load(p_low + rows, mask=inside, other=0.0), down, DOT)
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
        scores = tl.load(p_scores + pages, mask=optional, other=0.0)
        chosen, count = _best_pages(scores, forced, optional, wanted)
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
    row_bytes = padded(cache.head_dim) * cache.summaries.low.dtype.itemsize
    tile = max(16, min(PAGES_PER_TILE, PAGES_PER_TILE * 256 // row_bytes))
    tiles = triton.cdiv(max_pages, tile)
    fused = tiles == 1 or 2 * lists >= processors(q.device)
    for programs, score, choose in [(1, True, True)] if fused else [(tiles, True, False), (1, False, True)]:
        _select_pages_fwd_kernel[(lists, programs)](
            q,
            cache.summaries.low,
            cache.summaries.high,
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
            SCORE=score,
            CHOOSE=choose,
            MEAN=cache.summaries.low is cache.summaries.high,
            DOT=cache.summaries.low.dtype == torch.bfloat16 and not interpreted(),
            PAGE=cache.page_size,
            D=cache.head_dim,
            BLOCK_D=padded(cache.head_dim),
            BLOCK_R=min(QUERY_ROWS, triton.next_power_of_2(q.shape[1] * group_size)),
            TILE=tile,
            BLOCK_P=block,
            BLOCK_S=triton.next_power_of_2(max(1, slots)),
            STAGES=1 + TILES_AHEAD * (1 + cache.is_paged),  # where a page lies is loaded before its summary
            num_warps=min(16, max(4, block // 256)) if choose and not score else WARPS if fused else 4,
            **overlap(q.device),
        )
    return chosen, counts
